import numpy as np
import pytest
import torch

from deepinfer.backends.select import load_ops
from deepinfer.config.engine import ModelOptions
from deepinfer.messages import SlotSetup
from deepinfer.sampling.masks import exclude_masked
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.structured.rows import RowMasks


def masks(rows, allowed, vocab_size):
    """Masks that allow these token ids in these rows."""
    flags = np.zeros((len(rows), 32 * -(-vocab_size // 32)), dtype=np.uint8)
    for line, ids in enumerate(allowed):
        flags[line, ids] = 1
    bits = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    return RowMasks(np.array(rows, dtype=np.int64), bits, {})


@pytest.mark.parametrize("vocab_size", [7, 32, 33, 100, 4096])
def test_exactly_the_tokens_without_a_bit_are_excluded(vocab_size):
    random = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(random.standard_normal((5, vocab_size)).astype(np.float32))
    allowed = [np.flatnonzero(random.random(vocab_size) < 0.4) for _ in range(5)]
    for rows in ([1, 3], [0, 1, 2, 3, 4]):
        masked = exclude_masked(logits, masks(rows, [allowed[row] for row in rows], vocab_size))
        for row in range(5):
            kept = allowed[row] if row in rows else np.arange(vocab_size)
            assert torch.equal(masked[row, kept], logits[row, kept])
            others = np.setdiff1d(np.arange(vocab_size), kept)
            assert torch.isneginf(masked[row, others]).all()


@pytest.fixture
def sampler():
    ops = load_ops(ModelOptions(device="cpu", precision="float32"))
    sampler = Sampler(ops, 3, vocab_size=50, eos_ids=(1,), device=torch.device("cpu"))
    for slot, (temperature, logprobs) in enumerate([(0.0, 1), (1.0, None), (0.0, None)]):
        params = SamplingParams(temperature=temperature, seed=1, logprobs=logprobs)
        sampler.set_slot(SlotSetup(slot, params, 0, np.zeros(0, dtype=np.int32)))
    return sampler


SLOTS, POSITIONS = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.int32)


def test_greedy_and_random_rows_take_allowed_tokens_and_others_are_untouched(sampler):
    logits = torch.zeros(3, 50)
    logits[:, 9] = 5.0
    drawn = sampler.sample(logits, SLOTS, POSITIONS, masks([0, 1], [[3, 4], [30]], 50))
    assert drawn.token_ids.tolist() == [3, 30, 9] and drawn.is_finite.all()
    assert drawn.logprobs.top_ids[0].tolist() == [9] and drawn.logprobs.ranks[0] == 5


def test_a_mask_does_not_hide_logits_that_are_not_finite(sampler):
    logits = torch.zeros(3, 50)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    logits[1, 8] = 1.0
    drawn = sampler.sample(logits, SLOTS, POSITIONS, masks([0, 1], [[3], [4]], 50))
    assert drawn.is_finite.tolist() == [False, True, True]
    assert drawn.has_choice.tolist() == [True, False, True]
