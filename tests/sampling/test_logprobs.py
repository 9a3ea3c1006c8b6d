import math

import numpy as np
import torch

from deepinfer.messages import SlotSetup
from deepinfer.sampling.logprobs import drawn_logprobs, token_logprobs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slot_params import SlotParams


def params_of(*wanted: int | None):
    slots, numbers = SlotParams(len(wanted)), np.arange(len(wanted), dtype=np.int32)
    for slot, count in enumerate(wanted):
        slots.set(SlotSetup(slot, SamplingParams(seed=0, logprobs=count), 0, numbers[:0]))
    return slots.rows(numbers, numbers, 4)


def model_logprobs(logits, token_ids, is_finite, params):
    return drawn_logprobs(logits, logits, token_ids, is_finite, params)


LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]).log() + 7.0
ALL_FINITE = torch.tensor([True, True])


def test_nobody_asking_costs_nothing():
    assert model_logprobs(LOGITS, torch.tensor([0, 1]), ALL_FINITE, params_of(None, None)) is None


def test_values_and_ranks_are_of_the_chosen_token():
    result = model_logprobs(LOGITS, torch.tensor([3, 2]), ALL_FINITE, params_of(0, 0))
    torch.testing.assert_close(result.values, torch.tensor([0.125, 0.3]).log())
    assert result.ranks.tolist() == [4, 2]  # token 3 ties with 2 and comes after it
    assert result.ranks.dtype == torch.int32
    assert result.top_ids.shape == (2, 0)


def test_top_tokens_come_best_first_with_ties_by_id():
    result = model_logprobs(LOGITS, torch.tensor([0, 0]), ALL_FINITE, params_of(3, 1))
    assert result.top_ids.tolist() == [[0, 1, 2], [3, 2, 1]]
    torch.testing.assert_close(result.top_values.exp(), torch.tensor([[0.5, 0.25, 0.125], [0.4, 0.3, 0.2]]))


def test_rows_that_do_not_ask_are_zero():
    result = model_logprobs(LOGITS, torch.tensor([0, 3]), ALL_FINITE, params_of(None, 2))
    assert result.values[0] == 0 and result.ranks[0] == 0 and result.top_ids[0].tolist() == [0, 0]
    assert math.isclose(result.values[1].item(), math.log(0.4), rel_tol=1e-5)
    assert result.ranks[1] == 1


def test_more_alternatives_than_tokens_gives_them_all():
    assert model_logprobs(LOGITS, torch.tensor([0, 0]), ALL_FINITE, params_of(20, 20)).top_ids.shape == (2, 4)


def test_a_broken_row_does_not_disturb_the_others():
    logits = LOGITS.clone()
    logits[0, 2] = math.nan
    result = model_logprobs(logits, torch.tensor([0, 3]), torch.tensor([False, True]), params_of(2, 2))
    assert result.top_ids[1].tolist() == [3, 2]


def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_a_large_vocabulary():
    logits = 3 * torch.randn(6, 129_280, generator=torch.Generator().manual_seed(2))  # logsumexp differs in one row
    token_ids, num_threads = torch.arange(6), torch.get_num_threads()
    torch.set_num_threads(2)  # torch would cut the sum of a single row
    try:
        together = token_logprobs(logits, token_ids, 2)
        for row in range(6):
            alone = token_logprobs(logits[row : row + 1], token_ids[row : row + 1], 2)
            assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(num_threads)
