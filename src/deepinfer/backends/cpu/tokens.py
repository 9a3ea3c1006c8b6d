"""The token ring of each slot."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, write_cache
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.tensors import dense
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect


def store_tokens(tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    tokens = dense("tokens", tokens.int(), (batch.num_tokens,), torch.int32)
    expect("token ring", ring, (None, None))
    native().store_ring(batch_address(batch), tokens.data_ptr(), write_cache("token ring", ring, 1, torch.int32))
