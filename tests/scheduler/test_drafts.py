"""Rows with drafts: what is planned before results are known, and what results of several tokens do."""

import numpy as np

from deepinfer.messages import StepResult
from null_engine import NullEngine


def int32(*values):
    return np.array(values, dtype=np.int32)


def result(plan, *rows, broken=(), wants_drafts=True):
    """Tokens of each sampling row; lines in `broken` hold none."""
    tokens = int32(*(token for row in rows for token in row))
    usable = np.ones(len(tokens), dtype=np.bool_)
    usable[list(broken)] = False
    return StepResult(
        plan.step, tokens, usable, num_tokens=int32(*map(len, rows)),
        num_checked=np.where(plan.is_prefill, 0, plan.counts - 1)[plan.samples], wants_drafts=wants_drafts,
    )  # fmt: skip


def started(**options):
    """An engine with one request of 3 + 10 tokens whose first token, 50, is known."""
    engine = NullEngine(num_drafts=3, **options)
    engine.add("a", 3, max_tokens=10)
    engine.scheduler.update(result(engine.plan(), [50]))
    return engine, engine.scheduler


def test_rows_begin_at_the_least_position_and_have_blocks_for_the_greatest():
    engine, scheduler = started()
    first, second = engine.plan(), engine.plan()
    assert (first.starts.tolist(), first.counts.tolist()) == ([3], [4])
    assert (second.starts.tolist(), second.counts.tolist()) == ([4], [4])
    assert engine.cache.num_slot_blocks[1] * engine.cache.block_tokens >= 11
    output = scheduler.update(result(first, [60, 61]))
    assert output.request_ids == ["a", "a"] and output.token_ids.tolist() == [60, 61]
    third = engine.plan()
    assert third.starts.tolist() == [6] and third.counts.tolist() == [3]  # the limit is 12, and 9 may be computed
    scheduler.check()


def test_nothing_is_planned_once_even_the_least_position_is_past_the_limit():
    engine, scheduler = started()
    plans = []
    while (plan := engine.plan()) is not None:
        plans.append(plan)
    assert [int(plan.starts[0]) for plan in plans] == list(range(3, 12))
    scheduler.update(result(plans[0], [60, 61, 62, 63]))
    assert scheduler._state.num_computed[1] == 12


def test_tokens_behind_one_that_ends_the_answer_are_dropped_and_its_rows_in_flight_too():
    engine, scheduler = started(eos_token_ids=(7,))
    first, second = engine.plan(), engine.plan()
    output = scheduler.update(result(first, [60, 7, 62]))
    assert output.token_ids.tolist() == [60, 7]
    (end,) = output.finished
    assert (end.reason, end.stop_token, end.num_checked_drafts, end.num_accepted_drafts) == ("stop", 7, 3, 2)
    late = scheduler.update(result(second, [63, 64]))
    assert not late.request_ids and not late.finished and not scheduler.has_work()


def test_a_line_without_a_token_ends_the_request_behind_the_tokens_before_it():
    engine, scheduler = started()
    output = scheduler.update(result(engine.plan(), [60, 61, 0], broken=[2]))
    assert output.token_ids.tolist() == [60, 61]
    (end,) = output.finished
    assert end.reason == "error" and "ends after 3 tokens" in end.error and "position 6" in end.error


def test_an_end_before_a_line_without_a_token_counts():
    engine, scheduler = started(eos_token_ids=(7,))
    output = scheduler.update(result(engine.plan(), [7, 0], broken=[1]))
    assert output.token_ids.tolist() == [7] and output.finished[0].reason == "stop"


def test_the_length_ends_an_answer_inside_a_row():
    engine, scheduler = started()
    first, second, third = engine.plan(), engine.plan(), engine.plan()
    scheduler.update(result(first, [60, 61, 62, 63]))
    output = scheduler.update(result(second, [64, 65, 66, 67, 68][: second.counts[0]]))
    assert not output.finished
    last = scheduler.update(result(third, [69]))
    assert last.finished[0].reason == "length" and len(last.request_ids) == 1


def test_a_request_takes_no_block_of_another_for_its_drafts():
    engine = NullEngine(num_blocks=4, num_slots=2, block_tokens=2, num_drafts=3, max_model_len=10)
    for name in ("a", "b"):
        engine.add(name, 2, max_tokens=3)
    engine.scheduler.update(result(engine.plan(), [50], [51]))
    plan = engine.plan()
    assert plan.counts.tolist() == [2, 2] and engine.scheduler.num_preemptions == 0


def test_prompts_get_half_of_what_decode_rows_leave():
    engine, _ = started(max_step_tokens=9)
    engine.add("b", 30, max_tokens=2)
    plan = engine.plan()
    assert plan.counts.tolist() == [4, 5]


def test_steps_are_plain_once_no_drafts_are_wanted_and_none_are_in_flight():
    engine, scheduler = started()
    first, second = engine.plan(), engine.plan()
    scheduler.update(result(first, [60, 61], wants_drafts=False))
    third = engine.plan()
    scheduler.update(result(second, [62], wants_drafts=False))
    fourth = engine.plan()
    assert [plan.counts.tolist() for plan in (second, third, fourth)] == [[4], [1], [1]]
    assert [plan.is_plain for plan in (first, second, third, fourth)] == [False, False, False, True]
    assert fourth.starts.tolist() == [7]  # of 7 known tokens the newest is not computed, and one is in flight
    scheduler.update(result(third, [63]))
    fifth = engine.plan()
    assert not fifth.is_plain and (fifth.starts.tolist(), fifth.counts.tolist()) == ([8], [4])


def test_a_prompt_makes_a_step_and_the_one_behind_it_not_plain():
    engine, scheduler = started()
    scheduler.update(result(engine.plan(), [60], wants_drafts=False))
    assert engine.plan().is_plain
    engine.add("b", 5, max_tokens=4)
    with_prompt, behind, third = engine.plan(), engine.plan(), engine.plan()
    assert with_prompt.counts.tolist() == [1, 5] and behind.counts.tolist() == [1, 1]
    assert [plan.is_plain for plan in (with_prompt, behind, third)] == [False, False, False]
