"""The likeliest token and the draw by kernel: the reference's ids, whatever the rows and wherever ties lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.cuda import pair
from deepinfer.backends.cuda.hopper.sample import BEST_PART, PART, best_logprobs, best_tokens, draw


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


@pytest.mark.parametrize("temperature", [0.01, 1.0, 1000.0])
def test_scores_that_float32_cannot_tell_apart_are_told_apart(temperature: float) -> None:
    logits = 5e4 + 0.01 * torch.randn(5, PART + 300, generator=torch.Generator().manual_seed(1))
    found, expected = both(logits, temperature)
    assert found == expected


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


@pytest.mark.parametrize("num_ids", [1, 640, BEST_PART, BEST_PART + 1, 3 * BEST_PART - 5])
def test_the_likeliest_token_and_its_log_probability_are_the_reference_s(num_ids: int) -> None:
    logits = 3 * torch.randn(7, 2, num_ids, generator=torch.Generator().manual_seed(num_ids))[:, 1]
    logits[1, num_ids // 2 :] = float("-inf")
    logits[2, num_ids // 3 :] = 9.0
    placed, expected = logits.to(pair.DEVICE), pair.reference().best_tokens(logits)
    found = best_tokens(placed)
    assert found[0].dtype == torch.int64 and found[0].tolist() == expected[0].tolist()
    assert found[1].dtype == torch.bool and found[1].tolist() == expected[1].tolist()
    logprobs = best_logprobs(placed)
    assert logprobs.tolist() == pytest.approx(logits.double().log_softmax(-1).amax(-1).tolist(), abs=1e-6, nan_ok=True)
    assert torch.equal(torch.cat([best_logprobs(row.unsqueeze(0)) for row in placed]), logprobs) or num_ids == 1
    assert best_tokens(placed[:0])[0].shape == best_logprobs(placed[:0]).shape == (0,)


@pytest.mark.parametrize("place", [0, 5, BEST_PART, 2 * BEST_PART - 1])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_row_with_what_is_no_finite_number_gives_0(place: int, value: str) -> None:
    logits = torch.zeros(3, 2 * BEST_PART)
    logits[1, place], logits[2] = float(value), float("-inf")
    logits[:, 7] += 1.0
    token_ids, is_finite = best_tokens(logits.to(pair.DEVICE))
    assert token_ids.tolist() == [7, 0, 0] and is_finite.tolist() == [True, False, False]
    assert best_logprobs(logits[2:].to(pair.DEVICE)).isnan().all()
