"""The stages that change logits, each by itself: what it costs, touches and remembers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.sampling.bad_words import BadWords
from deepinfer.sampling.bias import Bias
from deepinfer.sampling.golden import Golden
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.penalties import Penalties
from deepinfer.sampling.sampler import make_changes
from deepinfer.sampling.slot_params import SlotParams

CPU = torch.device("cpu")
PLAIN = SamplingParams(seed=0, temperature=0.0)
USERS = {
    "Bias": replace(PLAIN, logit_bias={1: 2.0}),
    "BadWords": replace(PLAIN, bad_words=["x"]),
    "MinTokens": replace(PLAIN, min_tokens=5),
    "Penalties": replace(PLAIN, frequency_penalty=0.5),
}


def setup(slot, params, prompt=(2,), answer=(), bad_words=((1,),)):
    known = np.array([*prompt, *answer], np.int32)
    return SlotSetup(slot, params, len(prompt), known, bad_words if params.bad_words else ())


def rows(setups, slots, position=1):
    params = SlotParams(1 + max(one.slot for one in setups))
    for one in setups:
        params.set(one)
    slots = np.array(slots, np.int32)
    return params.rows(slots, np.full_like(slots, position), 4)


@pytest.mark.parametrize("number", range(4))
def test_a_stage_touches_only_the_rows_of_its_users(number):
    setups = [setup(1, PLAIN), setup(2, PLAIN)]
    stage = make_changes(4, 4, (0,), CPU)[number]
    for one in setups:
        stage.set_slot(one)
    assert stage.prepare(rows(setups, [1, 2]), CPU) is None, "nobody uses it"
    setups.append(setup(3, USERS[type(stage).__name__], answer=(1,)))
    stage.set_slot(setups[-1])
    assert stage.prepare(rows(setups, [1, 2]), CPU) is None, "its user is not in the step"
    logits = torch.tensor([[1.0, -0.0, 3.0, float("nan")], [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    changed = stage.apply(logits, stage.prepare(rows(setups, [1, 3, 2]), CPU))
    assert torch.equal(changed[[0, 2]].view(torch.int32), logits[[0, 2]].view(torch.int32))
    assert not torch.equal(changed[1], logits[1])
    stage.set_slot(setup(3, PLAIN))
    assert stage.prepare(rows([*setups[:2], setup(3, PLAIN)], [3]), CPU) is None, "its user has left"


def test_stages_without_users_hold_no_memory():
    bias, bad_words, _, penalties = make_changes(513, 129_280, (0,), CPU)
    for stage in (bias, bad_words, penalties):
        stage.set_slot(setup(1, PLAIN))
    assert bias._biases.tensor.numel() == bad_words._newest.tensor.numel() == 0
    assert penalties._counts.tensor.numel() == penalties._is_prompt.tensor.numel() == 0


def test_the_repetition_penalty_is_for_prompt_and_answer_the_others_for_the_answer():
    stage, one = Penalties(2, 4, CPU), setup(1, replace(PLAIN, repetition_penalty=2.0), prompt=(0, 1), answer=(2,))
    stage.set_slot(one)
    logits = torch.tensor([[1.0, -1.0, 4.0, 5.0]])
    assert stage.apply(logits, stage.prepare(rows([one], [1]), CPU)).tolist() == [[0.5, -2.0, 2.0, 5.0]]
    one = setup(1, replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25), prompt=(0, 1), answer=(2, 2, 3))
    stage.set_slot(one)
    assert stage.apply(logits, stage.prepare(rows([one], [1]), CPU)).tolist() == [[1.0, -1.0, 3.0, 4.25]]
    stage.observe(np.array([1], np.int32), torch.tensor([3]))
    assert stage.apply(logits, stage.prepare(rows([one], [1]), CPU)).tolist() == [[1.0, -1.0, 3.0, 4.0]]


def test_a_bad_word_needs_its_beginning_in_the_answer_not_in_the_prompt():
    stage = BadWords(3, CPU)
    words = replace(PLAIN, bad_words=["made up"])
    setups = [setup(1, words, (2, 3), (), ((2, 3, 1),)), setup(2, words, (0,), (2, 3), ((2, 3, 1), (3, 0), (3, 1)))]
    for one in setups:
        stage.set_slot(one)
    changed = stage.apply(torch.zeros(2, 4), stage.prepare(rows(setups, [1, 2]), CPU))
    assert changed.isinf().tolist() == [[False] * 4, [True, True, False, False]]
    stage.observe(np.array([1, 2], np.int32), torch.tensor([2, 2]))
    changed = stage.apply(torch.zeros(2, 4), stage.prepare(rows(setups, [1, 2]), CPU))
    assert not changed.isinf().any()


def test_allowed_tokens_and_biases_go_together():
    stage, one = Bias(2, 4, CPU), setup(1, replace(PLAIN, allowed_token_ids=[1, 2], logit_bias={2: 3.0, 3: 100.0}))
    stage.set_slot(one)
    changed = stage.apply(torch.ones(1, 4), stage.prepare(rows([one], [1]), CPU))
    assert changed.tolist() == [[float("-inf"), 1.0, 4.0, float("-inf")]]


def test_golden_tokens_replace_the_drawn_ones_at_their_places():
    golden = Golden()
    setups = [setup(1, replace(PLAIN, golden_token_ids=[3, 1])), setup(2, PLAIN)]
    for one in setups:
        golden.set_slot(one)
    drawn = torch.tensor([0, 0])
    forced = [golden.force(drawn, rows(setups, [2, 1], place)).tolist() for place in (1, 2, 3)]
    assert forced == [[0, 3], [0, 1], [0, 0]]
    golden.set_slot(setup(1, PLAIN))
    assert golden.force(drawn, rows(setups, [2, 1])) is drawn
