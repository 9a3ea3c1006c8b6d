"""Memory of packed weights."""

from __future__ import annotations

import pytest

from deepinfer.backends.cpu.memory import CHUNK_BYTES, PAGE_BYTES, Arena


def test_pieces_lie_side_by_side():
    arena = Arena()
    pieces = [arena.take(num_bytes) for num_bytes in (20, 96, 0, 14)]
    assert [len(piece) for piece in pieces] == [20, 96, 0, 14]
    addresses = [piece.data_ptr() for piece in pieces if len(piece)]
    assert addresses[0] % PAGE_BYTES == 0
    assert [address - addresses[0] for address in addresses] == [0, 64, 192]


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 10, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_what_does_not_fit_gets_a_chunk_of_its_own(num_bytes):
    arena = Arena()
    pieces = [arena.take(size) for size in (100, num_bytes, 100)]
    assert all((piece == 0).all() for piece in pieces)
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    assert [piece.unique().tolist() for piece in pieces] == [[0], [1], [2]]
