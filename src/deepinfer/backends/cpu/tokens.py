"""The token ring of each slot, the block table, and the likeliest tokens.

Small things, done in numpy on the same memory: unlike torch's ops it does not let go of the GIL.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, write_cache
from deepinfer.backends.cpu.library import short_native
from deepinfer.backends.cpu.tensors import dense
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.values import Int32


def store_tokens(tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    narrow = torch.from_numpy(tokens.numpy().astype(np.int32))
    tokens = dense("tokens", narrow, (batch.num_tokens,), torch.int32)
    expect("token ring", ring, (None, None))
    short_native().store_ring(batch_address(batch), tokens.data_ptr(), write_cache("token ring", ring, 1, torch.int32))


def read_tokens(ring: Tensor, slots: Int32, positions: Int32) -> Tensor:
    """Tokens [n] int64 at these positions of their slots in the ring [slots, length] int32."""
    return torch.from_numpy(ring.numpy()[slots, positions % ring.shape[1]].astype(np.int64))


def write_tokens(token_ids: Tensor, ring: Tensor, slots: Int32, positions: Int32) -> None:
    """Put tokens [n] int64 there."""
    ring.numpy()[slots, positions % ring.shape[1]] = token_ids.numpy()


def read_table(table: Tensor, slots: Int32, columns: int) -> Tensor:
    """The first `columns` entries of these slots' lines [n, columns]."""
    return torch.from_numpy(table.numpy()[slots, :columns])


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id [n] int64 of each row's largest logit, the lower of equal ones, and is_finite [n] bool; else id 0."""
    expect("logits", logits, (None, None), torch.float32)
    values = logits.numpy()
    token_ids = values.argmax(axis=1)  # NaN is the largest
    is_finite = np.isfinite(values[np.arange(len(values)), token_ids])
    token_ids[~is_finite] = 0
    return torch.from_numpy(token_ids), torch.from_numpy(is_finite)


def best_logprobs(logits: Tensor) -> Tensor:
    """The log-probability [n] float32 of each row's likeliest token."""
    values = logits.numpy()
    with np.errstate(invalid="ignore"):  # a row of -inf gives NaN
        shares = np.exp(values - values.max(axis=1, keepdims=True))
    return torch.from_numpy(-np.log(shares.sum(axis=1)))
