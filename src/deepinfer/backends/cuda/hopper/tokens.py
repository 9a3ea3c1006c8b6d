"""The token ring, written without asking the device how many tokens it keeps."""

from __future__ import annotations

from torch import Tensor

from deepinfer.backends.cuda.hopper.rings import write_ring
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect


def store_tokens(tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    expect("tokens", tokens, (batch.num_tokens,))
    expect("token ring", ring, (None, None))
    write_ring(ring, tokens.to(ring.dtype), batch)
