import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.ops import table
from deepinfer.ops.reference.build import reference_ops
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.slot_params import SlotParams

RANDOM = SamplingParams(seed=1)
GREEDY = SamplingParams(seed=1, temperature=0)


def sampler_with(*params: SamplingParams, vocab_size: int = 5) -> Sampler:
    """A sampler on the reference ops; the parameters are those of slots 1, 2, ..."""
    ops = table.build({"reference": reference_ops("float32")})
    sampler = Sampler(ops, len(params) + 1, vocab_size, (0,), torch.device("cpu"))
    for slot, one in enumerate(params, start=1):
        sampler.set_slot(setup(slot, one))
    return sampler


def setup(slot: int, params: SamplingParams, prompt=(), answer=(), bad_words=()) -> SlotSetup:
    return SlotSetup(slot, params, len(prompt), np.array([*prompt, *answer], np.int32), bad_words)


def sample(sampler: Sampler, logits: torch.Tensor, slots=None, positions=None):
    rows = logits.shape[0]
    slots = np.arange(1, rows + 1, dtype=np.int32) if slots is None else np.array(slots, np.int32)
    positions = np.zeros(rows, np.int32) if positions is None else np.array(positions, np.int32)
    return sampler.sample(logits, slots, positions)


def refuse_to_draw(*_):
    raise AssertionError("a greedy step must not draw")


def test_greedy_steps_take_the_argmax_without_a_draw():
    sampler = sampler_with(GREEDY, GREEDY)
    sampler._ops.draw = refuse_to_draw
    result = sample(sampler, torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]]))
    assert result.token_ids.tolist() == [1, 0]  # ties go to the lower id
    assert result.token_ids.dtype == torch.int64
    assert result.is_finite.tolist() == [True, True]
    assert result.logprobs is None


def test_greedy_rows_stay_greedy_among_random_ones():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    result = sample(sampler_with(GREEDY, RANDOM, replace(GREEDY, top_k=1, top_p=0.1)), logits)
    assert result.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def test_stages_bound_what_random_rows_can_draw():
    sampler = sampler_with(replace(RANDOM, top_k=2, temperature=50.0), replace(RANDOM, temperature=50.0))
    logits = torch.arange(10.0).repeat(2, 1)
    drawn = [sample(sampler, logits, positions=[p, p]).token_ids.tolist() for p in range(200)]
    assert {first for first, _ in drawn} == {8, 9}
    assert {second for _, second in drawn} == set(range(10))


def test_rows_do_not_depend_on_each_other_or_on_their_place():
    params = [replace(RANDOM, seed=5), replace(RANDOM, seed=6, top_p=0.7), GREEDY, replace(RANDOM, seed=7, min_p=0.2)]
    sampler = sampler_with(*params)
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(1))
    together = sample(sampler, logits, positions=[3, 4, 5, 6]).token_ids.tolist()
    backwards = sample(sampler, logits.flip(0), slots=[4, 3, 2, 1], positions=[6, 5, 4, 3]).token_ids.tolist()
    alone = [
        sample(sampler, logits[row : row + 1], slots=[row + 1], positions=[row + 3]).token_ids.item()
        for row in range(4)
    ]
    assert together == backwards[::-1] == alone


@pytest.mark.parametrize("params", [RANDOM, GREEDY, replace(RANDOM, top_k=2, top_p=0.5, min_p=0.1, logprobs=2)])
@pytest.mark.parametrize(
    "broken",
    [[0.0, math.nan, 1.0, 2.0], [-math.inf] * 4, [math.nan] * 4, [0.0, math.inf, 1.0, 2.0]],
    ids=["one nan", "nothing finite", "all nan", "infinity"],
)
def test_rows_that_are_not_finite_are_flagged_and_leave_others_alone(params, broken):
    sampler = sampler_with(params, params, params)
    good = torch.tensor([0.3, 2.0, -math.inf, 0.1])
    whole = sample(sampler, torch.stack([good, good, good]))
    result = sample(sampler, torch.stack([good, torch.tensor(broken), good]))
    assert result.is_finite.tolist() == [True, False, True]
    assert result.token_ids.tolist() == [whole.token_ids[0], 0, whole.token_ids[2]]
    if result.logprobs is not None:
        assert result.logprobs.values[[0, 2]].tolist() == whole.logprobs.values[[0, 2]].tolist()


def test_draws_follow_the_distribution_that_the_stages_leave():
    params = replace(RANDOM, temperature=2.0, top_k=3)
    weights = torch.tensor([0.36, 0.25, 0.16, 0.13, 0.10])
    num_draws = 4000
    sampler = sampler_with(params)
    result = sample(sampler, weights.log().repeat(num_draws, 1), slots=[1] * num_draws, positions=range(num_draws))
    counts = result.token_ids.bincount(minlength=5)
    assert counts[3:].tolist() == [0, 0]
    expected = torch.tensor([0.6, 0.5, 0.4]) / 1.5 * num_draws  # square roots of the best three
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees: 0.1 % level; seeded


def test_logits_are_not_changed_and_logprobs_are_of_the_model():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    before = logits.clone()
    result = sample(sampler_with(replace(RANDOM, top_k=1, temperature=9.0, logprobs=3)), logits)
    assert torch.equal(logits, before)
    assert result.token_ids.tolist() == [0]
    torch.testing.assert_close(result.logprobs.top_values.exp(), torch.tensor([[0.5, 0.25, 0.25]]))


def test_a_new_occupant_replaces_every_parameter_of_its_slot():
    sampler = sampler_with(replace(RANDOM, top_k=1, logprobs=1))
    assert sample(sampler, torch.zeros(1, 5)).logprobs is not None
    sampler.set_slot(setup(1, GREEDY))
    assert sample(sampler, torch.zeros(1, 5)).logprobs is None


def test_no_rows_give_no_tokens():
    result = sample(sampler_with(RANDOM), torch.zeros(0, 5))
    assert result.token_ids.shape == (0,) and result.is_finite.shape == (0,)


def test_tiny_temperatures_act_as_zero():
    slots = SlotParams(2)
    slots.set(setup(0, replace(RANDOM, temperature=1e-6)))
    slots.set(setup(1, replace(RANDOM, temperature=1e-4)))
    both = np.array([0, 1], np.int32)
    assert slots.rows(both, both, 4).is_random.tolist() == [False, True]


def plain_draws(*params: SamplingParams, start=0):
    slots = np.arange(1, len(params) + 1, dtype=np.int32)
    return sampler_with(*params).plain_draws(slots, np.full_like(slots, start))


def test_plain_rows_tell_temperature_and_seed():
    plain = plain_draws(GREEDY, replace(RANDOM, seed=9, temperature=0.5), replace(GREEDY, top_k=2))
    assert plain is not None and plain.temperature.tolist() == [0.0, 0.5, 0.0] and plain.seeds.tolist() == [1, 9, 1]


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}},
     {"golden_token_ids": (1, 2)}],
    ids=str,
)  # fmt: skip
def test_one_row_with_stages_or_a_given_answer_makes_none_of_them_plain(fields):
    assert plain_draws(RANDOM, RANDOM) is not None
    assert plain_draws(RANDOM, replace(RANDOM, **fields)) is None


def test_a_new_occupant_is_asked_whether_it_is_plain():
    sampler, slots, starts = sampler_with(RANDOM, RANDOM), np.array([1, 2], np.int32), np.array([0, 0], np.int32)
    assert sampler.plain_draws(slots, starts) is not None
    sampler.set_slot(setup(2, replace(RANDOM, top_k=3)))
    assert sampler.plain_draws(slots, starts) is None and sampler.plain_draws(slots[:1], starts[:1]) is not None
    sampler.set_slot(setup(2, replace(GREEDY, min_tokens=3)))
    assert sampler.plain_draws(slots, starts) is None and sampler.plain_draws(slots, starts + 2) is not None


def test_a_row_is_plain_once_it_may_end():
    waiting = replace(GREEDY, min_tokens=3)
    assert plain_draws(waiting, start=2) is not None
    assert plain_draws(waiting, start=1) is None


def test_greedy_rows_that_no_stage_is_for_are_asked_about_once():
    sampler, asked = sampler_with(GREEDY, replace(GREEDY, logprobs=1), replace(GREEDY, min_tokens=3)), []
    prepare = sampler._changes[0].prepare
    sampler._changes[0].prepare = lambda *given: asked.append(1) or prepare(*given)
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, 0.0]])
    for position in range(4):
        assert sample(sampler, logits, slots=[1], positions=[position]).token_ids.tolist() == [1]
    assert len(asked) == 1
    assert sample(sampler, logits, slots=[2]).logprobs is not None
    likely_end = torch.tensor([[9.0, 3.0, 2.0, 0.0, 0.0]])  # token 0 ends an answer
    drawn = [sample(sampler, likely_end, slots=[3], positions=[position]).token_ids.item() for position in (0, 2, 3, 4)]
    assert drawn == [1, 1, 0, 0]
    sampler.set_slot(setup(1, replace(GREEDY, logit_bias={2: 5.0})))  # a new occupant is asked about again
    assert sample(sampler, logits, slots=[1], positions=[5]).token_ids.tolist() == [2]
