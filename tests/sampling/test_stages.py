import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slot_params import RowParams, SlotParams
from deepinfer.sampling.stages import FILTERS, MinP, TopK, TopP, parts_of, unit_of

CPU = torch.device("cpu")
FIXED = SamplingParams(seed=0)


def rows_of(params: list[SamplingParams], vocab_size: int) -> RowParams:
    slots = SlotParams(len(params) + 1)
    numbers = np.arange(1, len(params) + 1, dtype=np.int32)
    for slot, one in enumerate(params, start=1):
        slots.set(SlotSetup(slot, one, 0, numbers[:0]))
    return slots.rows(numbers, np.zeros_like(numbers), vocab_size)


def kept(stage, logits: torch.Tensor, *params: SamplingParams) -> list[list[int]]:
    prepared = stage.prepare(rows_of(list(params), logits.shape[1]), CPU)
    result = stage.apply(logits, prepared)
    finite = result.isfinite()
    assert torch.equal(result[finite], logits[finite])  # kept logits stay bit for bit
    return [row.nonzero()[:, 0].tolist() for row in finite]


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log()


def test_unused_stages_prepare_nothing():
    params = [FIXED, replace(FIXED, top_k=-1), replace(FIXED, top_k=8), replace(FIXED, top_p=1.0, min_p=0.0)]
    assert [stage.prepare(rows_of(params, 8), CPU) for stage in FILTERS] == [None, None, None]


def test_greedy_rows_pay_for_no_stage():
    greedy = SamplingParams(seed=0, temperature=0, top_k=3, top_p=0.5, min_p=0.1)
    tiny = replace(greedy, temperature=1e-7)
    assert [stage.prepare(rows_of([greedy, tiny], 8), CPU) for stage in FILTERS] == [None, None, None]


def test_top_k_keeps_the_lower_of_equal_ids():
    logits = torch.tensor([[1.0, 5.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(TopK(), logits, replace(FIXED, top_k=1)) == [[1]]
    assert kept(TopK(), logits, replace(FIXED, top_k=3)) == [[1, 2, 3]]
    assert kept(TopK(), logits, replace(FIXED, top_k=5)) == [[0, 1, 2, 3, 4]]


def test_top_k_touches_only_the_rows_that_use_it():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    assert kept(TopK(), logits, replace(FIXED, top_k=1), FIXED, replace(FIXED, top_k=2)) == [[0], [0, 1, 2], [1, 2]]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = probabilities(0.5, 0.25, 0.125, 0.125)
    assert kept(TopP(), logits, replace(FIXED, top_p=0.4)) == [[0]]
    assert kept(TopP(), logits, replace(FIXED, top_p=0.6)) == [[0, 1]]
    assert kept(TopP(), logits, replace(FIXED, top_p=0.8)) == [[0, 1, 2]]  # 2 and 3 tie, the lower id is kept
    assert kept(TopP(), logits, replace(FIXED, top_p=0.95)) == [[0, 1, 2, 3]]


def test_top_p_always_keeps_one_token():
    assert kept(TopP(), torch.zeros(1, 4), replace(FIXED, top_p=1e-9)) == [[0]]
    assert kept(TopP(), torch.tensor([[-math.inf, 2.0, -math.inf]]), replace(FIXED, top_p=0.5)) == [[1]]


def test_top_p_and_min_p_act_at_the_temperature():
    logits = probabilities(0.6, 0.3, 0.1)
    # At temperature 2 the shares are square roots: 0.472, 0.334, 0.193; relative to the best 1, 0.707, 0.408.
    cool, warm = replace(FIXED, top_p=0.5), replace(FIXED, top_p=0.5, temperature=2.0)
    assert kept(TopP(), logits.repeat(2, 1), cool, warm) == [[0], [0, 1]]
    cool, warm = replace(FIXED, min_p=0.4), replace(FIXED, min_p=0.4, temperature=2.0)
    assert kept(MinP(), logits.repeat(2, 1), cool, warm) == [[0, 1], [0, 1, 2]]


def test_min_p_of_one_keeps_the_best():
    assert kept(MinP(), torch.tensor([[1.0, 4.0, 3.9, 4.0]]), replace(FIXED, min_p=1.0)) == [[1, 3]]


def test_top_p_counts_what_top_k_left():
    logits = probabilities(0.4, 0.3, 0.2, 0.1)
    params = rows_of([replace(FIXED, top_k=2, top_p=0.5)], 4)
    for stage in FILTERS:
        prepared = stage.prepare(params, CPU)
        logits = logits if prepared is None else stage.apply(logits, prepared)
    assert logits.isfinite().tolist() == [[True, False, False, False]]  # 0.4 / 0.7 >= 0.5 alone


@pytest.mark.parametrize("stage", FILTERS, ids=lambda stage: type(stage).__name__)
def test_every_stage_agrees_with_a_plain_loop(stage):
    torch.manual_seed(3)
    logits = torch.randn(40, 50).mul(2).round(decimals=1)  # rounding makes ties
    rng = np.random.default_rng(0)
    params = [
        SamplingParams(
            seed=0,
            temperature=float(rng.choice([0.3, 1.0, 1.7])),
            top_k=int(rng.integers(1, 50)),
            top_p=float(rng.uniform(0.05, 0.99)),
            min_p=float(rng.uniform(0.01, 0.9)),
        )
        for _ in range(40)
    ]
    result = kept(stage, logits, *params)
    for row, one, ids in zip(logits.tolist(), params, result, strict=True):
        assert ids == plain_loop(stage, row, one)


def plain_loop(stage, row: list[float], params: SamplingParams) -> list[int]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weights = [math.exp((row[i] - row[order[0]]) / params.temperature) for i in range(len(row))]
    if isinstance(stage, MinP):
        return [i for i in range(len(row)) if weights[i] >= params.min_p]
    if isinstance(stage, TopK):
        return sorted(order[: params.top_k])
    taken, total = [], 0.0
    for token in order:
        if total < params.top_p * sum(weights):
            taken.append(token)
        total += weights[token]
    return sorted(taken)


def test_top_p_sorts_to_the_end_for_flat_rows_only():
    torch.manual_seed(4)
    logits = torch.cat([torch.randn(2, 1000).mul(0.1).round(decimals=2), torch.randn(2, 1000).mul(5)])
    params = [replace(FIXED, top_p=p) for p in (0.9, 0.999, 0.9, 0.5)]
    result = kept(TopP(), logits, *params)
    assert [len(ids) for ids in result[:2]] == [pytest.approx(886, abs=20), pytest.approx(998, abs=2)]
    assert result == [plain_loop(TopP(), row, one) for row, one in zip(logits.tolist(), params, strict=True)]


def test_stages_take_zero_rows():
    params = rows_of([], 4)
    assert [stage.prepare(params, CPU) for stage in FILTERS] == [None, None, None]


@pytest.mark.parametrize("vocab_size", [5, 129_280])
def test_sums_of_weights_are_exact_in_any_order(vocab_size):
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    best, temperature, unit = logits.amax(-1, keepdim=True), torch.full((6,), 0.7), unit_of(vocab_size)
    weights = parts_of(logits, best, temperature, unit)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))
    sums = weights.sum(-1)
    assert torch.equal(weights[:, order].cumsum(-1)[:, -1], sums)
    assert sums.tolist() == [sum(row) for row in weights.tolist()], "a sum of python's integers cannot overflow"
    torch.testing.assert_close(sums.double() / unit, ((logits - best) / 0.7).exp().double().sum(-1), rtol=1e-7, atol=0)


def test_the_sum_of_equal_weights_fits():
    logits = torch.zeros(1, 200_000)
    weights = parts_of(logits, logits[:, :1], torch.ones(1), unit_of(200_000))
    assert int(weights.sum()) == 200_000 * int(weights[0, 0]) < 2**62 and int(weights[0, 0]) >= 2**44
