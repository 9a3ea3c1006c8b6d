"""Writing a step's values into the rings of their slots."""

from __future__ import annotations

from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect


def write_ring(ring: Tensor, values: Tensor, batch: TokenBatch) -> None:
    """Write each row's last `length` values at position % length; the padding slot 0 is left alone.

    ring [slots, length, ...] is changed in place; values [T, ...] of the same dtype.
    """
    expect("ring values", values, (batch.num_tokens, *ring.shape[2:]), ring.dtype)
    length = ring.shape[1]
    slots = batch.row_slots[batch.rows]
    ends = batch.row_starts + batch.row_offsets.diff()
    kept = ((slots > 0) & (batch.positions >= ends[batch.rows] - length)).nonzero().squeeze(1)
    ring[slots[kept], batch.positions[kept] % length] = values[kept]
