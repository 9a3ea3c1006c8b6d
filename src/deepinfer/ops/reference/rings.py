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
    kept, slots, places = batch.once(("ring", length), lambda: _kept_tokens(batch, length))
    ring[slots, places] = values if kept is None else values[kept]


def _kept_tokens(batch: TokenBatch, length: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Tokens that a ring of this length keeps (None = all), their slots and their places in it."""
    rows = batch.rows.long()
    slots, positions = batch.row_slots.long()[rows], batch.positions.long()
    ends = batch.row_starts + batch.row_offsets.diff()
    kept = ((slots > 0) & (positions >= ends[rows] - length)).nonzero().squeeze(1)
    if len(kept) == batch.num_tokens:
        return None, slots, positions % length
    return kept, slots[kept], positions[kept] % length
