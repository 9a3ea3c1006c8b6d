"""store_tokens against the reference."""

from __future__ import annotations

import pytest
import torch

from backends.cpu import pair
from deepinfer.errors import ShapeError
from ops import world


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_rings_equal_the_reference(length, kind):
    for stretches in ([(1, 0, 20)], [(2, 5, 1), (0, 0, 3), (1, 8, 0), (3, 11, 4)], [(3, 100, 2)], []):
        batch = world.make_batch(stretches)
        tokens = torch.arange(1000, 1000 + batch.num_tokens).to(kind)
        rings = [torch.zeros(4, length + 2, dtype=torch.int32)[:, 1:-1] for _ in range(2)]  # a view into slots
        for ops, ring in zip((pair.cpu(), pair.reference()), rings, strict=True):
            ops.store_tokens(tokens, batch, ring)
        assert torch.equal(*rings)
        assert not rings[0][0].any()
        assert not rings[0]._base[:, [0, -1]].any()


def test_a_ring_of_another_type_is_refused():
    batch = world.make_batch([(1, 0, 2)])
    with pytest.raises(ShapeError, match="token ring is torch.int64"):
        pair.cpu().store_tokens(torch.tensor([1, 2]), batch, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="tokens has shape"):
        pair.cpu().store_tokens(torch.tensor([1]), batch, torch.zeros(2, 3, dtype=torch.int32))
