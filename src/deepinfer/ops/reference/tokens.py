"""The token ring of each slot."""

from __future__ import annotations

from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.rings import write_ring
from deepinfer.ops.reference.shapes import expect


def store_tokens(numerics: Numerics, tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    expect("tokens", tokens, (batch.num_tokens,))
    expect("token ring", ring, (None, None))
    write_ring(ring, tokens.to(ring.dtype), batch)
