"""The token ring of each slot, and the block table."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.rings import write_ring
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.transfer import to_device
from deepinfer.ops.values import Int32


def store_tokens(numerics: Numerics, tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    expect("tokens", tokens, (batch.num_tokens,))
    expect("token ring", ring, (None, None))
    write_ring(ring, tokens.to(ring.dtype), batch)


def read_tokens(numerics: Numerics, ring: Tensor, slots: Int32, positions: Int32) -> Tensor:
    """Tokens [n] int64 at these positions of their slots in the ring [slots, length] int32."""
    return ring[_places(ring, slots, positions)].long()


def write_tokens(numerics: Numerics, token_ids: Tensor, ring: Tensor, slots: Int32, positions: Int32) -> None:
    """Put tokens [n] int64 there."""
    ring.index_put_(_places(ring, slots, positions), token_ids.to(ring.dtype))


def read_table(numerics: Numerics, table: Tensor, slots: Int32, columns: int) -> Tensor:
    """The first `columns` entries of these slots' lines [n, columns]."""
    return table[:, :columns].index_select(0, to_device(slots, table.device))


def verify(
    numerics: Numerics, token_ids: Tensor, is_usable: Tensor, batch: TokenBatch, ring: Tensor, newest: Tensor
) -> None:
    """Write the newest token of each row [rows], once its drafts are checked, and its position: [2, rows] int32.

    (Why equal draws are kept: `speculate/verify.py`.)
    """
    expect("is_usable", is_usable, token_ids.shape)
    expect("token ring", ring, (None, None))
    expect("newest", newest, (2, None), ring.dtype)
    num_rows = newest.shape[1]
    starts, slots, offsets = (part[:num_rows].long() for part in (batch.row_starts, batch.row_slots, batch.row_offsets))
    counts = batch.row_offsets[1 : num_rows + 1] - offsets
    place = torch.arange(int(counts.max()) if num_rows else 1, device=ring.device)
    lines = (offsets[:, None] + place).clamp(max=len(token_ids) - 1)
    drafts = ring[slots[:, None], (starts[:, None] + 1 + place) % ring.shape[1]]
    agrees = (token_ids[lines] == drafts) & is_usable[lines] & (place < counts[:, None] - 1)
    accepted = agrees.cumprod(1).sum(1)
    newest[0], newest[1] = token_ids[offsets + accepted], starts + 1 + accepted
    real = newest[:, slots > 0]
    ring[slots[slots > 0], real[1].long() % ring.shape[1]] = real[0]


def _places(ring: Tensor, slots: Int32, positions: Int32) -> tuple[Tensor, Tensor]:
    return to_device(slots, ring.device), to_device(positions % ring.shape[1], ring.device)
