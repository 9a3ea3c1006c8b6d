"""What is planned, and what results do; preemption and ends from outside have files of their own."""

import gc

import numpy as np
import pytest

from deepinfer.backends.null.runner import NullModel
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.messages import StepResult
from null_engine import NullEngine


def rows(plan):
    """(slot, start, count, is_prefill, samples) of each row."""
    arrays = (plan.slots, plan.starts, plan.counts, plan.is_prefill, plan.samples)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def test_an_idle_scheduler_plans_nothing():
    engine = NullEngine()
    assert engine.scheduler.schedule() is None
    assert not engine.scheduler.has_work()


def test_a_request_runs_from_prompt_to_length():
    engine = NullEngine()
    engine.add("a", 3, max_tokens=3)
    assert engine.run() == 3
    assert [rows(plan) for plan in engine.history] == [
        [(1, 0, 3, True, True)],
        [(1, 3, 1, False, True)],
        [(1, 4, 1, False, True)],
    ]
    assert engine.tokens("a") == engine.direct("a")
    assert engine.reason("a") == "length"


def test_the_plan_carries_prompt_tokens_setup_and_table_entries_of_a_new_request():
    engine = NullEngine()
    engine.add("a", [7, 8, 9, 10, 11])
    plan = engine.plan()
    assert plan.host_tokens.tolist() == [7, 8, 9, 10, 11]
    assert [(setup.slot, setup.params) for setup in plan.setups] == [(1, engine.answers["a"].request.params)]
    changes = (plan.table_slots, plan.table_columns, plan.table_blocks)
    assert [array.tolist() for array in changes] == [[1, 1], [0, 1], [1, 2]]
    assert (plan.num_rows, plan.num_tokens) == (1, 5)
    assert engine.plan().setups == []


def test_plan_arrays_have_the_dtypes_of_the_message():
    engine = NullEngine()
    for name in "ab":
        engine.add(name, 4)
        plan = engine.plan()
    assert plan.is_prefill.tolist() == [False, True]
    for name in ("slots", "starts", "counts", "decoder_starts", "host_tokens", "table_slots", "table_blocks"):
        assert getattr(plan, name).dtype == np.int32, name
    for name in ("is_prefill", "samples", "wants_logits"):
        assert getattr(plan, name).dtype == np.bool_, name


def test_prompts_are_cut_into_chunks_and_only_the_last_samples():
    engine = NullEngine(max_chunk_tokens=3)
    engine.add("a", 8, max_tokens=1)
    engine.run()
    chunks = [rows(plan)[0][1:] for plan in engine.history]
    assert chunks == [(0, 3, True, False), (3, 3, True, False), (6, 2, True, True)]
    assert engine.tokens("a") == engine.direct("a")


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"max_step_tokens": 8, "max_chunk_tokens": 4}, [{2: (0, 4), 3: (0, 3)}, {2: (4, 4), 3: (3, 3)}]),
        ({"max_step_tokens": 30, "max_prefill_tokens": 6}, [{2: (0, 6)}, {2: (6, 4), 3: (0, 2)}]),
    ],
    ids=["a step and a chunk", "all prompts of a step"],
)
def test_decode_rows_come_first_and_prompts_share_what_is_theirs_in_order_of_admission(options, chunks):
    engine = NullEngine(**options)
    engine.add("a", 2)
    engine.step()
    engine.add("b", 10)
    engine.add("c", 10)
    for number, expected in enumerate(chunks):
        answer, *prompts = rows(engine.plan())
        assert answer == (1, 2 + number, 1, False, True)
        assert {slot: (start, count) for slot, start, count, *_ in prompts} == expected
        assert [row[3:] for row in prompts] == [(True, sum(chunk) == 10) for chunk in expected.values()]


def test_planning_goes_on_without_results_and_never_past_the_last_token():
    engine = NullEngine()
    engine.add("a", 3, max_tokens=4)
    plans = [engine.plan() for _ in range(6)]
    assert [plan and plan.starts.tolist() for plan in plans] == [[0], [3], [4], [5], None, None]
    assert engine.scheduler.has_work() and engine.scheduler.num_in_flight == 4
    engine.run()
    assert engine.tokens("a") == engine.direct("a")


def test_requests_are_admitted_by_priority_then_arrival():
    engine = NullEngine(num_slots=1)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1)]:
        engine.add(name, 2, max_tokens=1, priority=priority)
    engine.run()
    finished = [answer.finished for answer in engine.answers.values()]
    assert [end.request_id for end in sorted(finished, key=lambda end: end.times.finished)] == ["d", "a", "c", "b"]


def test_a_first_request_that_has_to_wait_is_not_overtaken_by_a_smaller_one():
    engine = NullEngine(num_blocks=4)
    engine.add("running", 4, max_tokens=5)
    engine.step()
    engine.add("big", 12, max_tokens=1)
    engine.add("small", 1, max_tokens=1)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 2)
    engine.run()
    finished = {name: answer.finished.times for name, answer in engine.answers.items()}
    assert finished["running"].finished < finished["big"].scheduled <= finished["small"].scheduled


def test_admission_leaves_a_block_for_each_running_request_that_will_grow():
    engine = NullEngine(num_blocks=3)
    engine.add("grows", 3, max_tokens=6)
    engine.step()
    engine.add("two blocks", 5, max_tokens=1)
    engine.step()
    assert engine.scheduler.num_waiting == 1
    engine.add("one block", 3, max_tokens=1, priority=-1)
    engine.step()
    assert engine.reason("one block") == "length"
    engine.run()


def test_admission_counts_the_block_of_the_next_token():
    engine = NullEngine(num_blocks=2)
    engine.add("holds one", 1, max_tokens=4)
    engine.step()
    engine.add("full block and more", 4, max_tokens=2)
    engine.step()
    assert engine.scheduler.num_waiting == 1
    engine.add("full block exactly", 4, max_tokens=1, priority=-1)
    engine.step()
    assert engine.reason("full block exactly") == "length"
    engine.run()


def test_bounded_replay_starts_the_decoder_half_late_but_not_for_scores():
    engine = NullEngine(decoder_replay="bounded", replay_keep_tokens=5)
    engine.add("long", 12)
    engine.add("short", 3)
    engine.add("score", 12, max_tokens=1, is_score=True)
    plan = engine.plan()
    assert plan.decoder_starts.tolist() == [7, 0, 0]
    assert plan.wants_logits.tolist() == [False, False, True]
    assert engine.plan().decoder_starts.tolist() == [7, 0]


def test_full_replay_runs_the_decoder_half_for_every_token():
    engine = NullEngine(decoder_replay="full", replay_keep_tokens=5)
    engine.add("long", 12)
    assert engine.plan().decoder_starts.tolist() == [0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_end_of_sequence_and_stop_tokens_end_an_answer_and_surplus_results_are_dropped(depth):
    engine = NullEngine(depth=depth, eos_token_ids=(3, 4), model=NullModel(vocab_size=12))
    for seed in range(4):
        engine.add(f"eos {seed}", 4, max_tokens=50, seed=seed)
        engine.add(f"stop {seed}", 4, max_tokens=50, seed=seed, ignore_eos=True, stop_token_ids=(1, 2, 11))
        engine.add(f"length {seed}", 4, max_tokens=50, seed=seed, ignore_eos=True)
    engine.run()
    for name, answer in engine.answers.items():
        tokens, reason, stop_token = engine.expected(name)
        assert reason == ("length" if "length" in name else "stop")
        assert (answer.tokens, answer.finished.reason, answer.finished.stop_token) == (tokens, reason, stop_token)


def test_a_stop_token_at_the_length_limit_counts_as_stop():
    engine = NullEngine()
    engine.add("probe", 3, max_tokens=2)
    engine.run()
    engine.add("a", 3, max_tokens=2, stop_token_ids=(engine.tokens("probe")[-1],))
    engine.run()
    assert engine.reason("a") == "stop"


def test_logits_without_a_finite_value_end_that_request_alone_and_say_so():
    engine = NullEngine(depth=2, model=NullModel(vocab_size=10, broken_token=7), eos_token_ids=())
    for seed in range(8):
        engine.add(f"r{seed}", 3, max_tokens=6, seed=seed)
    engine.run()
    reasons = {name: answer.finished.reason for name, answer in engine.answers.items()}
    assert sorted(set(reasons.values())) == ["error", "length"]
    for name, answer in engine.answers.items():
        tokens, reason, _ = engine.expected(name)
        assert (answer.tokens, answer.finished.reason) == (tokens, reason)
        if reason == "error":
            assert f"no finite logit for position {3 + len(tokens)}" in answer.finished.error
            assert name in answer.finished.error


def test_garbage_token_ids_of_broken_rows_are_never_looked_up():
    engine = NullEngine()
    engine.add("a", 3)
    plan = engine.plan()
    result = StepResult(plan.step, np.array([-(2**31)], dtype=np.int32), np.array([False]))
    output = engine.scheduler.update(result)
    assert (output.request_ids, len(output.token_ids), output.finished[0].reason) == ([], 0, "error")


def test_lines_of_logprobs_follow_the_tokens_when_rows_are_dropped():
    engine = NullEngine(depth=2)
    for name in "abc":
        engine.add(name, 3, max_tokens=8, seed=ord(name), logprobs=2)
    engine.step()
    engine.scheduler.finish("b", "abort")
    engine.run()
    for name in "abc":
        assert engine.answers[name].logprobs == [-token for token in engine.tokens(name)]
    assert engine.tokens("a") == engine.direct("a") and engine.tokens("c") == engine.direct("c")


def test_prompt_logits_come_once_for_every_position():
    engine = NullEngine(max_chunk_tokens=5, depth=2)
    engine.add("score", 13, max_tokens=1, is_score=True)
    engine.add("other", 9)
    engine.run()
    assert engine.answers["score"].logit_positions == list(range(13))
    assert engine.answers["other"].logit_positions == []


def test_times_are_taken_at_admission_first_token_and_end():
    engine = NullEngine(num_slots=1)
    engine.add("a", 3, max_tokens=2)
    engine.add("b", 3, max_tokens=1)
    engine.run()
    a, b = (engine.answers[name].finished.times for name in "ab")
    assert a.arrival < b.arrival < a.scheduled < a.first_token < a.finished < b.scheduled < b.first_token <= b.finished


def test_results_must_come_in_the_order_of_the_plans():
    engine = NullEngine()
    engine.add("a", 3)
    engine.plan()
    second = engine.plan()
    with pytest.raises(AssertionError, match="result of step 2 came, that of step 1 was due"):
        engine.scheduler.update(StepResult(second.step, np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.bool_)))


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        (60, {"max_tokens": 5}, "max_tokens is 5 but prompt \\(60 tokens\\) \\+ max_tokens must be <= 64"),
        (20, {"max_tokens": 6}, "prompt \\(20 tokens\\) \\+ max_tokens \\(6\\) needs 7 cache blocks of 4 tokens"),
        ([], {}, "'bad' has an empty prompt"),
        (3, {"priority": 2**31}, "priority is 2147483648; it must be from -2147483647 to 2147483647"),
        (3, {"stop_token_ids": (5, 2**40)}, "stop_token_ids holds 1099511627776; the vocabulary ends at 999"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_true_numbers_and_hurts_nobody(prompt, fields, message):
    engine = NullEngine(num_blocks=6)
    engine.add("good", 3)
    with pytest.raises(RequestError, match=message):
        engine.add("bad", prompt, **fields)
    assert engine.scheduler.num_waiting == 1
    engine.run()
    assert engine.tokens("good") == engine.direct("good")


def test_the_largest_request_that_fits_is_taken():
    engine = NullEngine(num_blocks=6)
    engine.add("a", 20, max_tokens=5)
    engine.run()
    assert len(engine.tokens("a")) == 5
    assert engine.cache.max_held_blocks == 6


def test_a_full_queue_refuses_with_true_numbers_and_takes_requests_again_later():
    engine = NullEngine(max_queue=2)
    engine.add("a", 3)
    engine.add("b", 3)
    with pytest.raises(QueueFullError, match="2 requests wait already and max_queue is 2"):
        engine.add("c", 3)
    engine.step()
    engine.add("c", 3)
    engine.run()
    assert {engine.reason(name) for name in "abc"} == {"length"}


def test_an_id_is_refused_while_in_use_and_free_once_its_end_was_handed_out():
    engine = NullEngine()
    engine.add("a", 3)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add("a", 5)
    engine.step()
    engine.scheduler.finish("a", "abort")
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add("a", 5)
    engine.run()
    engine.add("a", 5)
    engine.run()
    assert engine.tokens("a") == engine.direct("a")


def test_steps_leave_no_garbage_cycles():
    assert 0 in [cycles_of_a_run() for _ in range(5)]  # threads of other tests may leave some in one of them


def cycles_of_a_run():
    engine = NullEngine(depth=2, num_blocks=12)
    gc.collect()
    gc.disable()
    try:
        for name in "abcdef":
            engine.add(name, 5, max_tokens=9, seed=ord(name))
        engine.run()
        return gc.collect()
    finally:
        gc.enable()
