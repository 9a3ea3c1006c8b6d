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


def test_decoding_lists_active_slots_whose_prefill_has_ended_and_that_may_be_below_their_limit():
    state = occupied(*[(params(), 0)] * 5)  # limit 6
    state.num_computed[1] = 3
    for slot, rows in ((2, [1]), (3, [1, 3]), (4, [1, 1, 1]), (5, [1])):
        for count in rows:
            state.plan_row(int32(slot), int32(count))
    state.is_active[5] = False
    assert state.num_computed[1:].tolist() == [3, 4, 6, 6, 4]
    assert state.decoding().tolist() == [2, 3]  # slot 3 begins at 5 if its drafts are refused; slot 4 at 6
    assert state.decoding().dtype == np.int32


def test_rows_move_the_bounds_of_where_the_next_one_begins():
    state = occupied((params(), 0))  # 4 known tokens, limit 6
    seen = []
    for plan, count, given in [(True, 1, 0), (True, 2, 0), (False, 1, 1), (True, 2, 0), (False, 2, 1), (False, 2, 1)]:
        if plan:
            state.plan_row(int32(1), int32(count))
        else:
            state.take_row(int32(1), int32(count), int32(given))
        seen.append((int(state.first_starts[1]), int(state.num_computed[1]), state.in_flight(1)))
    assert seen == [(4, 4, 1), (5, 6, 2), (5, 6, 1), (6, 6, 2), (6, 6, 1), (6, 6, 0)]


def test_best_first_orders_by_priority_then_computed_then_admission():
    state = occupied((params(), 1), (params(), 0), (params(), 0), (params(), 0), (params(), 1))
    state.num_computed[1:] = [9, 2, 5, 2, 1]
    assert state.best_first(int32(5, 4, 3, 2, 1)).tolist() == [3, 2, 4, 1, 5]
