"""Memory of packed weights."""

from __future__ import annotations

import pytest
import torch

from deepinfer.backends.cpu.memory import CHUNK_BYTES, PAGE_BYTES, Arena


def tensors() -> list[torch.Tensor]:
    return [torch.arange(5.0), torch.arange(12).view(3, 4).mT, torch.zeros(0, 3), torch.ones(7, dtype=torch.bfloat16)]


def test_tensors_keep_their_values_side_by_side():
    arena = Arena()
    placed = [arena.place(tensor) for tensor in tensors()]
    for tensor, original in zip(placed, tensors(), strict=True):
        assert torch.equal(tensor, original)
        assert tensor.is_contiguous()
        assert tensor.dtype == original.dtype
    addresses = [tensor.data_ptr() for tensor in placed if len(tensor)]
    assert addresses[0] % PAGE_BYTES == 0
    assert [address - addresses[0] for address in addresses] == [0, 64, 192]


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 10, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_what_does_not_fit_gets_a_chunk_of_its_own(num_bytes):
    arena = Arena()
    small = arena.place(torch.full((100,), 7, dtype=torch.uint8))
    large = arena.place(torch.full((num_bytes,), 9, dtype=torch.uint8))
    last = arena.place(torch.full((100,), 8, dtype=torch.uint8))
    assert [int(t.unique()) for t in (small, large, last)] == [7, 9, 8]
