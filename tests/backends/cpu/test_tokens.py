"""Token rings, the block table and the likeliest tokens against the reference."""

from __future__ import annotations

import numpy as np
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


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("ops", [pair.reference(), pair.cpu()], ids=["reference", "cpu"])
def test_tokens_are_written_where_they_are_read(ops):
    ring = torch.zeros(4, 6, dtype=torch.int32)[:, 1:]  # a view into slots, five places long
    slots, positions = int32(3, 1, 2), int32(12, 5, 4)
    ops.write_tokens(torch.tensor([70, 80, 90]), ring, slots, positions)
    assert ring.tolist() == [[0] * 5, [80, 0, 0, 0, 0], [0, 0, 0, 0, 90], [0, 0, 70, 0, 0]]
    assert not ring._base[:, 0].any()
    read = ops.read_tokens(ring, int32(2, 3, 1, 1), int32(9, 2, 0, 1))
    assert read.dtype == torch.int64 and read.tolist() == [90, 70, 80, 0]
    assert ops.read_tokens(ring, int32(), int32()).shape == (0,)


@pytest.mark.parametrize("ops", [pair.reference(), pair.cpu()], ids=["reference", "cpu"])
def test_lines_of_the_block_table_are_read_up_to_a_column(ops):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert ops.read_table(table, int32(2, 0, 2), 2).tolist() == [[8, 9], [0, 1], [8, 9]]
    assert ops.read_table(table, int32(1), 0).shape == (1, 0)
    assert ops.read_table(table, int32(1), 9).tolist() == [[4, 5, 6, 7]]  # it has no more


@pytest.mark.parametrize("ops", [pair.reference(), pair.cpu()], ids=["reference", "cpu"])
def test_best_tokens_takes_the_lower_of_equal_ids_and_marks_what_is_not_finite(ops):
    inf, nan = float("inf"), float("nan")
    rows = [[1, 3, 3, 2], [-1, -5, -1, -2], [0, nan, 9, 1], [0, inf, 1, 1], [-inf] * 4, [-inf, -inf, 2, -inf]]
    token_ids, is_finite = ops.best_tokens(torch.tensor(rows))
    assert token_ids.dtype == torch.int64 and token_ids.tolist() == [1, 0, 0, 0, 0, 2]
    assert is_finite.tolist() == [True, True, False, False, False, True]
    assert ops.best_tokens(torch.zeros(0, 4))[0].shape == (0,)


@pytest.mark.parametrize("ops", [pair.reference(), pair.cpu()], ids=["reference", "cpu"])
def test_best_logprobs_are_those_of_the_likeliest_tokens(ops):
    inf = float("inf")
    rows = [[0.0, 0.0, 0.0, 0.0], [-inf, 5.0, -inf, -inf], [0.0, 1.0, 2.0, 3.0], [1e4, -1e4, 0.0, 0.0]]
    expected = [-np.log(4), 0.0, -np.log(1 + np.exp(-1) + np.exp(-2) + np.exp(-3)), 0.0]
    assert ops.best_logprobs(torch.tensor(rows)).tolist() == pytest.approx(expected, abs=1e-6)
    assert ops.best_logprobs(torch.full((1, 3), -inf)).isnan().all()
    assert ops.best_logprobs(torch.zeros(0, 4)).shape == (0,)
