"""select against the reference, on whole numbers whose sums are exact: the same entries and candidates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backends.cpu.test_indexer import make_case, step
from backends.cuda import pair
from deepinfer.errors import ShapeError
from ops import world

pytest.importorskip("triton", reason="triton is not installed")


def both(weights, case, stretches, candidates=None, given=None):
    x, low_rank, batch = step(case, stretches)
    theirs, ours = pair.reference(), pair.hopper()
    expected = theirs.select(x, low_rank, batch, theirs.prepare_indexer(weights), case[3], candidates)
    prepared = ours.prepare_indexer(pair.placed(weights))
    arguments = pair.narrow(x), pair.narrow(low_rank), pair.placed(batch), prepared, pair.placed(case[3])
    return expected, ours.select(*arguments, None if given is None else pair.placed(given))


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_and_candidates_equal_the_reference(ratio):
    case = make_case(ratio, ((1, 150), (2, 61)))
    source = dataclasses.replace(case[0], keeps_candidates=True)
    later = dataclasses.replace(source, keeps_candidates=False)
    for stretches in ([(1, 149, 1), (2, 60, 1)], [(1, 95, 5), (0, 0, 1), (2, 3, 1)]):
        expected, found = both(source, case, stretches)
        assert torch.equal(found.entries.cpu(), expected.entries)
        assert torch.equal(found.candidates.cpu(), expected.candidates)
        expected, found = both(later, case, stretches, expected.candidates, found.candidates)
        assert torch.equal(found.entries.cpu(), expected.entries)


def test_all_entries_are_taken_where_they_are_few():
    case = make_case(2, ((1, 10),))
    expected, found = both(case[0], case, [(1, 0, 10)])
    assert torch.equal(found.entries.cpu(), expected.entries)


@pair.on_device
def test_a_row_has_the_same_choice_alone_and_in_a_batch():
    case = make_case(1, ((1, 150), (2, 61)), 4, 64, False)
    _, together = both(case[0], case, [(1, 140, 5), (2, 50, 3)])
    for offset, stretch in ((0, (1, 140, 5)), (5, (2, 50, 3))):
        _, alone = both(case[0], case, [stretch])
        assert torch.equal(together.entries[offset : offset + stretch[2]], alone.entries)


def test_parts_give_the_same_choice(monkeypatch):
    from deepinfer.backends.cuda.hopper import indexer

    case = make_case(1, ((1, 150), (2, 61)), 4, 64, False)
    _, whole = both(case[0], case, [(1, 140, 5), (2, 50, 2)])
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 147 * 4)
    _, parts = both(case[0], case, [(1, 140, 5), (2, 50, 2)])
    assert torch.equal(parts.entries, whole.entries)


def test_candidates_that_hold_too_few_entries_are_refused():
    case = make_case(1, ((1, 8),))
    with pytest.raises(ShapeError, match="3 candidate blocks of 2 entries"):
        pair.hopper().prepare_indexer(dataclasses.replace(case[0], candidate_blocks=3, candidate_size=2))


def test_nothing_visible_gives_no_columns():
    case = make_case(4, ((1, 8),))
    _, found = both(case[0], case, [(1, 0, 3)])
    assert found.entries.shape == (3, 0)
    assert world.BLOCK_TOKENS % 4 == 0
