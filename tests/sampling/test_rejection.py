"""Both ways to accept drafts give tokens that are distributed as without drafts (chi-square over many seeds)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.messages import SlotSetup
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import build
from deepinfer.sampling.before import Before
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.rejection import DRAFT_NOISE, Proposed
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculate.verify import checked_drafts, count_tokens

NUM_DRAWS, VOCAB = 20_000, 6
CHI_SQUARE_35 = 66.6  # exceeded once in a thousand times, with 35 degrees of freedom


def first_two_tokens(acceptance: str, temperature: float) -> np.ndarray:
    """[NUM_DRAWS, 2] tokens of as many seeds: drafted one at a time, checked, the second drawn again if need be."""
    random = torch.Generator().manual_seed(1)
    target, draft = torch.randn(1 + VOCAB, VOCAB, generator=random), torch.randn(1 + VOCAB, VOCAB, generator=random)
    ops = build({"reference": reference_ops("fast")})
    sampler = Sampler(ops, NUM_DRAWS + 1, VOCAB, [], torch.device("cpu"))
    for slot in range(1, NUM_DRAWS + 1):
        params = SamplingParams(temperature=temperature, seed=slot)
        sampler.set_slot(SlotSetup(slot, params, 1, np.zeros(1, dtype=np.int32)))
    slots, ones = np.arange(1, NUM_DRAWS + 1, dtype=np.int32), np.ones(NUM_DRAWS, dtype=np.int32)
    noise = 0 if acceptance == "coupled" else DRAFT_NOISE
    drafted, drawn_from, _ = sampler.propose(draft[:1].expand(NUM_DRAWS, -1), slots, ones, None, noise=noise)
    # Two lines a row: after the prompt, and after the draft.
    logits = torch.stack([target[0].expand(NUM_DRAWS, -1), target[1 + drafted]], dim=1).flatten(0, 1)
    drafts = drafted.numpy().astype(np.int32)[:, None]
    places = np.tile(np.array([0, 1], dtype=np.int32), NUM_DRAWS)
    before = Before(drafted.repeat_interleave(2)[:, None], places)
    proposed = None
    if acceptance == "rejection":
        proposed = Proposed(np.arange(0, 2 * NUM_DRAWS, 2), drafted, drawn_from)
    drawn = sampler.sample(
        logits, np.repeat(slots, 2), np.tile(np.array([1, 2], np.int32), NUM_DRAWS), None, before, proposed
    )
    tokens = drawn.token_ids.numpy().reshape(NUM_DRAWS, 2)
    flat, usable = tokens.ravel().astype(np.int32), np.ones(2 * NUM_DRAWS, dtype=np.bool_)
    num_tokens = count_tokens(flat, usable, checked_drafts(drafts, 2 * ones, places), np.arange(0, 2 * NUM_DRAWS, 2))
    assert 0.2 < (num_tokens == 2).mean() < 0.95
    again = sampler.sample(target[1 + torch.from_numpy(tokens[:, 0])], slots, 2 * ones).token_ids.numpy()
    return np.stack([tokens[:, 0], np.where(num_tokens == 2, tokens[:, 1], again)], axis=1)


def expected_counts(temperature: float) -> np.ndarray:
    random = torch.Generator().manual_seed(1)
    shares = (torch.randn(1 + VOCAB, VOCAB, generator=random).double() / temperature).softmax(-1)
    return NUM_DRAWS * (shares[0][:, None] * shares[1:]).numpy()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_first_two_tokens_are_distributed_as_the_target_says(acceptance: str, temperature: float) -> None:
    tokens, expected = first_two_tokens(acceptance, temperature), expected_counts(temperature)
    counts = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).reshape(VOCAB, VOCAB)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_35
    uniform = np.full_like(expected, NUM_DRAWS / VOCAB**2)
    assert ((counts - uniform) ** 2 / uniform).sum() > 10 * CHI_SQUARE_35  # the test can fail


def test_rejection_leaves_greedy_rows_and_rows_without_drafts_alone() -> None:
    ops = build({"reference": reference_ops("fast")})
    sampler = Sampler(ops, 4, VOCAB, [], torch.device("cpu"))
    for slot, temperature in ((1, 0.0), (2, 1.0)):
        sampler.set_slot(SlotSetup(slot, SamplingParams(temperature=temperature, seed=1), 1, np.zeros(1, np.int32)))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    slots, positions = np.array([1, 1, 2, 2], np.int32), np.array([1, 2, 1, 2], np.int32)
    proposed = Proposed(np.array([0, 2]), torch.tensor([5, 5]), torch.zeros(2, VOCAB))
    plain, kept = (sampler.sample(logits, slots, positions, proposed=given).token_ids for given in (None, proposed))
    assert plain[[0, 1, 3]].tolist() == kept[[0, 1, 3]].tolist()
    assert plain[0] == logits[0].argmax()
