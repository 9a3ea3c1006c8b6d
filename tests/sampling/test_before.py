"""Stages at a checked draft's position act as if the drafts before it had been observed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import build
from deepinfer.sampling.before import Before
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler

VOCAB = 40
PARAMS = [
    {"frequency_penalty": 1.0, "presence_penalty": 0.7},
    {"repetition_penalty": 1.8, "temperature": 1.0},
    {"bad_words": ("a",), "min_tokens": 4},
    {"frequency_penalty": -2.0, "bad_words": ("b",), "temperature": 0.8, "top_k": 3},
]
BAD_WORDS = ((7,), (3, 9), (3, 9, 4), (9, 4, 3, 2))
DRAFTS = [[3, 9, 4, 3], [3, 3], [9], []]


def sampler_with(answers: list[list[int]]) -> Sampler:
    """Slots 1 to 4, each with a prompt of two tokens and an answer so far."""
    sampler = Sampler(build({"reference": reference_ops("fast")}), 5, VOCAB, [1], torch.device("cpu"))
    for slot, (fields, answer) in enumerate(zip(PARAMS, answers, strict=True), start=1):
        params = SamplingParams(**{"temperature": 0.0, "seed": slot, "max_tokens": 20} | fields)
        known = np.array([5, 3, *answer], dtype=np.int32)
        sampler.set_slot(SlotSetup(slot, params, 2, known, BAD_WORDS if params.bad_words else ()))
    return sampler


@pytest.mark.parametrize("seed", range(8))
def test_lines_after_drafts_equal_lines_of_answers_that_hold_them(seed: int) -> None:
    answers = [[4, 3], [], [3, 3, 9], [9, 4]]
    lines = [(slot, place) for slot, drafts in enumerate(DRAFTS, start=1) for place in range(len(drafts) + 1)]
    tokens = torch.tensor([DRAFTS[slot - 1] + [0] * (4 - len(DRAFTS[slot - 1])) for slot, _ in lines])
    before = Before(tokens, np.array([place for _, place in lines], dtype=np.int32))
    logits = 2 * torch.randn(len(lines), VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, [2, 3, 4, 7, 9]] += 3.0
    slots = np.array([slot for slot, _ in lines], dtype=np.int32)
    positions = np.array([2 + len(answers[slot - 1]) + place for slot, place in lines], dtype=np.int32)
    together = sampler_with(answers).sample(logits, slots, positions, None, before)
    drafted = sampler_with(answers).propose(logits, slots, positions, before).token_ids
    assert drafted.tolist() == together.token_ids.tolist()
    for line, (slot, place) in enumerate(lines):
        own = list(answers)
        own[slot - 1] = answers[slot - 1] + DRAFTS[slot - 1][:place]
        alone = sampler_with(own).sample(logits[line : line + 1], slots[line : line + 1], positions[line : line + 1])
        assert together.token_ids[line] == alone.token_ids[0], (slot, place)


def test_observing_tokens_one_by_one_equals_an_answer_that_holds_them() -> None:
    sampler, drafts = sampler_with([[], [], [], []]), [[3, 9, 4], [9], [9, 4, 3], [4, 9]]
    for place in range(3):
        rows = [row for row in range(4) if len(drafts[row]) > place]
        sampler.observe(np.array(rows, dtype=np.int32) + 1, torch.tensor([drafts[row][place] for row in rows]))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    slots, positions = np.arange(1, 5, dtype=np.int32), np.array([2 + len(own) for own in drafts], dtype=np.int32)
    fresh = sampler_with(drafts).sample(logits, slots, positions)
    assert sampler.sample(logits, slots, positions).token_ids.tolist() == fresh.token_ids.tolist()
