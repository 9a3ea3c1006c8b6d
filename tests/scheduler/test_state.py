import numpy as np

from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.state import SlotState


def occupied(*requests, eos_token_ids=(7,)):
    state = SlotState(len(requests), vocab_size=20, eos_token_ids=eos_token_ids)
    for slot, (params, priority) in enumerate(requests, start=1):
        prompt = np.zeros(4, dtype=np.int32)
        state.occupy(slot, Request(f"r{slot}", prompt, params, priority, 0.0, slot, 0, False), serial=slot)
    return state


def params(**fields):
    return SamplingParams(max_tokens=3, **fields)


def int32(*values):
    return np.array(values, dtype=np.int32)


def test_ends_answer_knows_end_of_sequence_and_each_requests_own_stop_tokens():
    state = occupied(
        (params(), 0),
        (params(ignore_eos=True), 0),
        (params(stop_token_ids=(3, 5)), 0),
        (params(ignore_eos=True, stop_token_ids=(7,)), 0),
    )
    slots = int32(1, 2, 3, 4)
    assert state.ends_answer(slots, int32(7, 7, 7, 7)).tolist() == [True, False, True, True]
    assert state.ends_answer(slots, int32(5, 5, 5, 5)).tolist() == [False, False, True, False]
    assert state.ends_answer(int32(4, 3), int32(3, 3)).tolist() == [False, True]


def test_stop_tokens_of_an_earlier_occupant_are_forgotten():
    state = occupied((params(stop_token_ids=(3, 5, 9)), 0))
    later = Request("later", np.zeros(4, dtype=np.int32), params(stop_token_ids=(4,)), 0, 0.0, 1, 0, False)
    state.occupy(1, later, serial=2)
    ended = [token for token in range(20) if state.ends_answer(int32(1), int32(token))[0]]
    assert ended == [4, 7]


def test_decoding_lists_active_slots_between_prefill_end_and_limit():
    state = occupied(*[(params(), 0)] * 5)
    state.num_computed[1:] = [3, 4, 5, 6, 5]
    state.is_active[5] = False
    assert state.decoding().tolist() == [2, 3]
    assert state.decoding().dtype == np.int32


def test_in_flight_counts_planned_tokens_that_are_not_known():
    state = occupied((params(), 0))
    counts = []
    for computed, known in [(0, 4), (3, 4), (4, 4), (5, 4), (5, 5), (5, 6)]:
        state.num_computed[1], state.num_known[1] = computed, known
        counts.append(state.in_flight(1))
    assert counts == [0, 0, 1, 2, 1, 0]


def test_best_first_orders_by_priority_then_computed_then_admission():
    state = occupied((params(), 1), (params(), 0), (params(), 0), (params(), 0), (params(), 1))
    state.num_computed[1:] = [9, 2, 5, 2, 1]
    assert state.best_first(int32(5, 4, 3, 2, 1)).tolist() == [3, 2, 4, 1, 5]
