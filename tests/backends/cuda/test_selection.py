"""The exact selection of the best columns, in registers and by groups, on rows that would mislead a guess."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference.indexer import top_entries

selection = pytest.importorskip("deepinfer.backends.cuda.hopper.selection", reason="triton is not installed")

INFINITY = torch.inf


def expected(scores: torch.Tensor, limits: list[int], count: int) -> torch.Tensor:
    rows = []
    for row, limit in zip(scores, limits, strict=True):
        known = row[:limit]
        chosen = min(count, int((known > -INFINITY).sum()))
        best = top_entries(known[None], chosen)[0].sort().values if chosen else torch.empty(0, dtype=torch.long)
        rows.append(torch.cat([best, torch.full((count - chosen,), -1)]))
    return torch.stack(rows)


def scores_of(kind: str, rows: int, width: int) -> torch.Tensor:
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    if kind == "few values":
        return (scores * 2).round() / 2
    if kind == "equal":
        return torch.full((rows, width), -3.0)
    if kind == "all excluded":
        return torch.full((rows, width), -INFINITY)
    if kind == "mostly excluded":
        scores[:, :-2] = -INFINITY
    elif kind == "zeros of both signs":
        scores[:] = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "infinite":
        scores = torch.where(scores > 0.5, INFINITY, torch.where(scores < -1, -INFINITY, scores))
    elif kind == "last bits":  # neighbours that differ in one bit, equal across groups
        scores = (torch.arange(width) % 24 + 0x3F800000).int().view(torch.float32).expand(rows, -1).clone()
    elif kind == "best in one group":
        scores[:, 16:24] += 100
    elif kind == "one in each group":  # so that as many groups as columns are needed
        scores[:, 3::8] = 50.0
    elif kind == "not a number":  # never chosen
        scores[:, 5::11] = torch.nan
    return scores


KINDS = (
    "normal", "few values", "equal", "all excluded", "mostly excluded", "zeros of both signs", "infinite", "last bits",
    "best in one group", "one in each group", "not a number",
)  # fmt: skip


def known(scores: torch.Tensor) -> torch.Tensor:
    return scores.nan_to_num(nan=-INFINITY, posinf=INFINITY, neginf=-INFINITY)


@pytest.mark.parametrize("direct", [2048, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_that_of_the_reference(monkeypatch, kind, direct):
    monkeypatch.setattr(selection, "DIRECT", direct)  # 64: groups of groups
    count, width = 40, 1100
    limits = [0, 1, count - 1, count, count + 1, 321, width]
    scores = scores_of(kind, len(limits), width)
    found = selection.best_columns(pair.placed(scores), pair.placed(torch.tensor(limits, dtype=torch.int32)), count)
    assert torch.equal(found.cpu().long(), expected(known(scores), limits, count))


@pytest.mark.parametrize("direct", [2048, 64])
def test_the_newest_of_several_units_is_pinned(monkeypatch, direct):
    monkeypatch.setattr(selection, "DIRECT", direct)
    visible = [0, 1, 3, 4, 1499, 2000]
    scores = scores_of("normal", len(visible), 500)
    limits = [-(-number // 4) for number in visible]
    found = selection.best_columns(
        pair.placed(scores), pair.placed(torch.tensor(visible, dtype=torch.int32)), 7, unit=4, is_pinned=True
    )
    for row, limit in enumerate(limits):
        scores[row, limit - 1] = INFINITY
    assert torch.equal(found.cpu().long(), expected(scores, limits, 7))


@pytest.mark.parametrize(("size", "unit"), [(8, 1), (4, 1), (3, 2)])
def test_peaks_are_the_best_visible_scores_of_groups(size, unit):
    scores, visible = scores_of("few values", 3, 1100), torch.tensor([0, 37, 1100 * unit], dtype=torch.int32)
    peaks = selection.group_peaks(pair.placed(scores), pair.placed(visible), size, unit).cpu()
    for row, number in enumerate(visible.tolist()):
        limit = -(-number // unit)
        parts = scores[row, :limit].split(size) if limit else ()
        assert peaks[row, : len(parts)].tolist() == [float(part.max()) for part in parts]


def test_columns_stand_for_the_entries_of_blocks():
    scores = torch.tensor([[1.0, 5.0, 9.0, 3.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0, 9.0, 9.0]])
    blocks = torch.tensor([[2, 5, 9], [0, 2, -1]], dtype=torch.int32)
    visible = torch.tensor([19, 5], dtype=torch.int32)
    found = selection.best_of_blocks(*map(pair.placed, (scores, visible)), 3, pair.placed(blocks), 2)
    assert found.tolist() == [[5, 10, 11], [0, 1, 4]]
    found = selection.best_of_blocks(*map(pair.placed, (scores, visible)), 5, pair.placed(blocks), 2)
    assert found.tolist() == [[4, 5, 10, 11, 18], [0, 1, 4, -1, -1]]


@pytest.mark.parametrize("width", [5000, 4997])
@pytest.mark.parametrize("kind", ["few values", "last bits"])
def test_many_columns_are_chosen_from_at_once(kind, width):
    limits = [4097, 4996, width]
    scores = scores_of(kind, 3, width)
    rows = selection.empty_scores(3, width, pair.DEVICE)
    rows[:] = scores
    given = rows, pair.placed(torch.tensor(limits, dtype=torch.int32)), 300
    assert torch.equal(selection.best_columns(*given).cpu().long(), expected(scores, limits, 300))
    blocks = torch.arange(625, dtype=torch.int32).expand(3, -1).contiguous()
    found = selection.best_of_blocks(*given, pair.placed(blocks), selection.GROUP)
    assert torch.equal(found.cpu().long(), expected(scores, limits, 300))
