"""Every change of logits, in every combination, in batches that change: each row is what the reference gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.ops import table
from deepinfer.ops.reference.build import reference_ops
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from sampling.reference import EXCLUDED, Row

VOCAB, NUM_SLOTS, EOS = 16, 6, (0,)
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
CHOICES = {
    "temperature": (0.0, 0.5, 1.0, 3.0),
    "min_tokens": (0, 0, 3, 9),
    "repetition_penalty": (1.0, 1.0, 1.7, 0.6),
    "presence_penalty": (0.0, 0.0, 1.5, -2.0),
    "frequency_penalty": (0.0, 0.0, 0.7, -0.4),
    "logit_bias": ((), (), {3: 2.5, 7: -100.0}, {token: (-1) ** token * 3.0 for token in range(VOCAB)}),
    "allowed_token_ids": (None, None, (0, 1, 2, 3, 5, 8, 13), tuple(range(VOCAB))),
    "stop_token_ids": ((), (4,), (9, 0)),
}
BAD_WORDS = ((), (), ((3,),), ((1, 2), (1, 5), (2,)), ((5, 5, 5), (8, 1)))


def sampler(device: str = "cpu") -> Sampler:
    ops = table.build({"reference": reference_ops("float32")})
    return Sampler(ops, NUM_SLOTS + 1, VOCAB, EOS, torch.device(device))


def setup_of(slot: int, row: Row) -> SlotSetup:
    known = np.array(row.prompt + row.answer, dtype=np.int32)
    return SlotSetup(slot, row.params, len(row.prompt), known, row.bad_words)


def random_row(draw: np.random.Generator) -> Row:
    values = {name: choices[draw.integers(len(choices))] for name, choices in CHOICES.items()}
    prompt = draw.integers(0, VOCAB, draw.integers(1, 12)).tolist()
    params = SamplingParams(seed=int(draw.integers(2**40)), logprobs=VOCAB, logprobs_mode="processed", **values)
    return Row(params, prompt, BAD_WORDS[draw.integers(len(BAD_WORDS))], EOS)


def check_row(row: Row, logits: list[float], token: int, ids: list[int], values: list[float]) -> None:
    """The distribution is the reference's, and a greedy token its likeliest."""
    expected = row.logprobs(logits)
    found = dict(zip(ids, values, strict=True))
    for other, value in enumerate(expected):
        assert found[other] == pytest.approx(value, abs=1e-4), f"token {other} of {row}"
    assert expected[token] > EXCLUDED, f"{row} drew an excluded token"
    if row.params.temperature == 0:
        assert expected[token] == pytest.approx(max(expected), abs=1e-4)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_rows_of_changing_batches_are_those_of_the_reference(seed: int, where: str) -> None:
    draw = np.random.default_rng(seed)
    device, rows = sampler(where), {}
    for _ in range(60):
        for slot in range(1, NUM_SLOTS + 1):
            event = draw.random()
            if slot not in rows or event < 0.05:  # a new request
                rows[slot] = random_row(draw)
                device.set_slot(setup_of(slot, rows[slot]))
            elif event < 0.1:  # preempted, and admitted again with what is known by now
                device.set_slot(setup_of(slot, rows[slot]))
        slots = draw.permutation(NUM_SLOTS)[: draw.integers(1, NUM_SLOTS + 1)].astype(np.int32) + 1
        logits = torch.from_numpy(draw.normal(0, 2, (len(slots), VOCAB)).astype(np.float32)).to(where)
        positions = np.array([len(rows[slot].prompt) + len(rows[slot].answer) for slot in slots], dtype=np.int32)
        result = device.sample(logits, slots, positions)
        device.observe(slots, result.token_ids)
        for line, slot in enumerate(slots.tolist()):
            token = int(result.token_ids[line])
            if result.has_choice is not None and not result.has_choice[line]:
                assert max(rows[slot].changed(logits[line].tolist())) == EXCLUDED
                del rows[slot]
                continue
            top = result.logprobs.top_ids[line].tolist(), result.logprobs.top_values[line].tolist()
            check_row(rows[slot], logits[line].tolist(), token, *top)
            rows[slot].answer.append(token)


def test_rows_of_one_slot_at_several_positions_share_its_state() -> None:
    row = Row(SamplingParams(seed=1, temperature=0.0, min_tokens=2, presence_penalty=2.0), [5, 6], ((3,),), EOS)
    device = sampler()
    device.set_slot(setup_of(1, row))
    logits = torch.zeros(3, VOCAB)
    logits[:, 0], logits[:, 3], logits[:, 7] = 9.0, 8.0, 7.0  # end of sequence, a bad word, another token
    result = device.sample(logits, np.array([1, 1, 1], np.int32), np.array([2, 3, 4], np.int32))
    assert result.token_ids.tolist() == [7, 7, 0]  # the third would be token number 2


def test_a_row_without_any_token_left_is_reported_and_others_are_not() -> None:
    device = sampler()
    device.set_slot(setup_of(1, Row(SamplingParams(seed=1, temperature=0.0, allowed_token_ids=[0], min_tokens=1), [1])))
    device.set_slot(setup_of(2, Row(SamplingParams(seed=1, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1), [1])))
    logits = torch.zeros(3, VOCAB)
    logits[2, 3] = math.nan
    slots, positions = np.array([1, 2, 2], np.int32), np.array([1, 1, 1], np.int32)
    result = device.sample(logits, slots, positions)
    assert result.has_choice.tolist() == [False, True, True]
    assert result.is_finite.tolist() == [True, True, False]
    assert device.sample(logits, slots, positions + 1).has_choice.tolist() == [True, True, True]
    assert device.sample(logits[1:2], slots[1:2], positions[1:2]).has_choice is None, "nobody pays for it"
