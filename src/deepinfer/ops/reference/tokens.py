"""The token ring of each slot, and the block table."""

from __future__ import annotations

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


def _places(ring: Tensor, slots: Int32, positions: Int32) -> tuple[Tensor, Tensor]:
    return to_device(slots, ring.device), to_device(positions % ring.shape[1], ring.device)
