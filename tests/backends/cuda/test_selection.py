"""The exact selection of the best columns, in registers, by a sample, and where the sample misleads."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference.indexer import top_entries

selection = pytest.importorskip("deepinfer.backends.cuda.hopper.selection", reason="triton is not installed")


def expected(scores: torch.Tensor, limits: list[int], count: int) -> torch.Tensor:
    rows = []
    for row, limit in zip(scores, limits, strict=True):
        known = row[:limit]
        chosen = min(count, int((known > -torch.inf).sum()))
        best = top_entries(known[None], chosen)[0].sort().values if chosen else torch.empty(0, dtype=torch.long)
        rows.append(torch.cat([best, torch.full((count - chosen,), -1)]))
    return torch.stack(rows)


def scores_of(kind: str, width: int) -> torch.Tensor:
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    if kind == "few values":
        scores = (scores * 2).round() / 2
    elif kind == "equal":
        scores = torch.zeros(3, width)
    elif kind == "mostly excluded":
        scores[:, :-2] = -torch.inf
    elif kind == "sample misleads":  # the columns that are sampled are low, all others high and equal
        scores[:] = 1.0
        scores[:, :: width // 256] = torch.linspace(-2, -1, len(scores[0, :: width // 256]))
    return scores


@pytest.mark.parametrize("width", [256, 1100])
@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "mostly excluded", "sample misleads"])
def test_selection_is_that_of_the_reference(monkeypatch, kind, width):
    monkeypatch.setattr(selection, "TILE", 256)
    scores, limits = scores_of(kind, width), [width, width // 2 + 1, 7]
    found = selection.best_columns(pair.placed(scores), pair.placed(torch.tensor(limits, dtype=torch.int32)), 40)
    assert torch.equal(found.cpu().long(), expected(scores, limits, 40))


def test_columns_stand_for_the_entries_of_blocks():
    scores = torch.tensor([[1.0, 5.0, -torch.inf, 3.0, 2.0, 4.0]])
    blocks = torch.tensor([[2, 5, 9]], dtype=torch.int32)
    limits = torch.tensor([6], dtype=torch.int32)
    found = selection.best_columns(*map(pair.placed, (scores, limits)), 3, pair.placed(blocks), 2)
    assert found.tolist() == [[5, 11, 19]]
