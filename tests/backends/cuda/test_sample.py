"""The draw by kernel: the reference's ids, whatever the rows and wherever ties lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.cuda import pair
from deepinfer.backends.cuda.hopper.sample import PART, draw


def keys(num_rows: int, temperature: float | list[float]) -> tuple[Tensor, Tensor, Tensor]:
    heat = torch.tensor(temperature).expand(num_rows) if isinstance(temperature, float) else torch.tensor(temperature)
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    return heat, seeds, torch.randint(0, 2**33, (num_rows,), generator=generator)


def both(logits: Tensor, temperature: float | list[float]) -> tuple[list[int], list[int]]:
    """Ids of the kernel and of the reference on the CPU."""
    given = keys(len(logits), temperature)
    found = draw(*(value.to(pair.DEVICE) for value in (logits, *given)))
    assert found.dtype == torch.int64
    return found.tolist(), pair.reference().draw(logits.contiguous(), *given).tolist()


@pytest.mark.parametrize("num_ids", [1, 5, 640, PART, PART + 1, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7, 100.0])
def test_ids_are_the_reference_s(num_ids: int, temperature: float) -> None:
    logits = 3 * torch.randn(9, num_ids, generator=torch.Generator().manual_seed(num_ids))
    found, expected = both(logits, temperature)
    assert found == expected


def test_rows_of_all_temperatures_stand_beside_each_other() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    heat = [0.0, 1.0, 0.0, 0.3, 5.0, 1e-5]
    found, expected = both(logits, heat)
    assert found == expected and found[0] == int(logits[0].argmax())
    given = [value.to(pair.DEVICE) for value in (logits, *keys(6, heat))]
    alone = [draw(*(value[row : row + 1] for value in given)) for row in range(6)]
    assert torch.cat(alone).tolist() == found


@pytest.mark.parametrize("place", [0, 7, PART - 1, PART, 2 * PART + 3])
def test_the_lowest_of_equal_logits_wins_across_parts(place: int) -> None:
    logits = torch.full((2, 3 * PART), -1.0)
    logits[:, place:] = 2.0
    assert both(logits, 0.0) == ([place, place], [place, place])


def test_excluded_ids_are_never_drawn_and_a_row_without_any_gives_0() -> None:
    logits = torch.full((4, 2 * PART), float("-inf"))
    logits[1, PART + 9] = -50.0
    logits[2, [3, PART + 3]] = torch.tensor([0.5, 0.25])
    found, expected = both(logits, 1.0)
    assert found == expected and found[0] == 0 and found[1] == PART + 9 and found[2] in (3, PART + 3)


def test_rows_may_lie_apart_and_be_none() -> None:
    logits = torch.randn(5, 4, 700, generator=torch.Generator().manual_seed(2))[:, 1]
    found, expected = both(logits, 1.0)
    assert found == expected
    assert both(logits[:0], 1.0) == ([], [])
