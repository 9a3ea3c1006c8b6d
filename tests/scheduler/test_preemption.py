"""Preemption by recompute: who is chosen, what is kept, and that all requests still end."""

import numpy as np
import pytest

from null_engine import NullEngine


def preempted(engine):
    """Names of the requests that were preempted."""
    return [name for name, answer in engine.answers.items() if answer.finished.num_preemptions]


def crowded(*requests, depth=1, **options):
    """An engine in which all requests run and together outgrow the blocks. requests: (name, prompt, priority)."""
    engine = NullEngine(depth=depth, **({"num_blocks": 8, "num_slots": 4} | options))
    for name, prompt, priority in requests:
        engine.add(name, prompt, max_tokens=24 - prompt, priority=priority, seed=ord(name), ignore_eos=True)
    return engine


def assert_all_answered(engine):
    for name in engine.answers:
        assert engine.tokens(name) == engine.direct(name), name
        assert engine.reason(name) == "length"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_answers_survive_preemption(depth):
    engine = crowded(("a", 3, 0), ("b", 3, 0), ("c", 3, 0), depth=depth)
    engine.run()
    assert engine.scheduler.num_preemptions >= 2
    assert_all_answered(engine)


def test_the_victim_is_the_one_with_the_fewest_computed_tokens():
    engine = crowded(("a", 3, 0), ("b", 9, 0), ("c", 5, 0))
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.run()
    assert preempted(engine)[0] == "a"
    assert_all_answered(engine)
    assert "b" not in preempted(engine)


def test_the_victim_comes_from_the_lowest_priority_class_however_much_it_computed():
    engine = crowded(("a", 3, 0), ("b", 9, 1), ("c", 3, 0), num_blocks=9)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.num_waiting == 1 and "b" in engine.scheduler._queue
    engine.run()
    assert_all_answered(engine)


def test_a_row_that_needs_a_block_gives_way_itself_when_it_is_last_in_order():
    engine = NullEngine(num_blocks=6, num_slots=2)
    engine.add("first", 9, max_tokens=8, ignore_eos=True)
    engine.add("last", 7, max_tokens=8, ignore_eos=True)
    engine.run()
    assert preempted(engine) == ["last"]
    assert [plan.slots.tolist() for plan in engine.history].count([1, 2]) >= 2
    assert_all_answered(engine)


def test_a_request_in_prefill_can_be_preempted_and_starts_again():
    engine = NullEngine(num_blocks=7, num_slots=2, max_step_tokens=4, max_chunk_tokens=1)
    engine.add("decodes", 2, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.add("prefills", 16, max_tokens=4, ignore_eos=True, priority=1)
    engine.run()
    assert preempted(engine) == ["prefills"]
    starts = [int(plan.starts[row]) for plan in engine.history for row in np.flatnonzero(plan.slots == 2)]
    assert starts == [0, 1, 2, 3, 4]
    again = next(plan for plan in engine.history[1:] if plan.setups and plan.setups[0].slot == 1)
    assert (again.starts.tolist(), again.host_tokens.tolist()) == ([0], [1])
    assert_all_answered(engine)


def test_tokens_in_flight_at_a_preemption_still_count_and_readmission_waits_for_them():
    engine = crowded(("a", 3, 0), ("b", 3, 0), ("c", 3, 0))
    while not engine.scheduler.num_preemptions:
        for _ in range(2):
            engine.plan()
        if not engine.scheduler.num_preemptions:
            engine.finish_oldest()
    (victim,) = engine.scheduler._table.draining
    assert victim.slot and engine.cache.num_slot_blocks[victim.slot] == 0
    num_known, num_in_flight = len(victim.generated), engine.scheduler._state.in_flight(victim.slot)
    assert num_in_flight > 0
    for name in "abc":
        if name != victim.request_id:
            engine.scheduler.finish(name, "abort")
    assert engine.plan() is None, "it was admitted while tokens of it were in flight"
    while engine.plans:
        engine.finish_oldest()
    assert len(victim.generated) == num_known + num_in_flight
    assert engine.plan().host_tokens.tolist() == victim.tokens(0, victim.num_tokens).tolist()
    engine.run()
    assert engine.tokens(victim.request_id) == engine.direct(victim.request_id)


def test_a_request_that_ends_by_a_token_in_flight_is_not_admitted_again():
    engine = crowded(("a", 3, 0), ("b", 3, 0), ("c", 3, 0))
    while not engine.scheduler.num_preemptions:
        for _ in range(2):
            engine.plan()
        if not engine.scheduler.num_preemptions:
            engine.finish_oldest()
    (victim,) = engine.scheduler._table.draining
    next_token = engine.direct(victim.request_id)[len(victim.generated)]
    engine.scheduler._state._is_eos[next_token] = True
    engine.scheduler._state._ignores_eos[victim.slot] = False
    num_plans = len(engine.history)
    engine.run()
    assert engine.answers[victim.request_id].finished.stop_token == next_token
    assert all(not plan.setups for plan in engine.history[num_plans : num_plans + 2])


def test_a_preempted_request_keeps_its_decoder_start_and_its_place():
    engine = crowded(("a", 9, 0), ("b", 7, 0), decoder_replay="bounded", replay_keep_tokens=5)
    engine.add("later", 5, max_tokens=2)
    engine.run()
    assert preempted(engine) == ["b"]
    plans = [plan for plan in engine.history if plan.setups and plan.step > 1]
    assert plans[0].decoder_starts[plans[0].is_prefill][0] == 2
    b, later = (engine.answers[name].finished.times for name in ("b", "later"))
    assert b.scheduled < later.scheduled


def test_scores_hand_out_each_position_once_across_a_preemption():
    engine = NullEngine(num_blocks=7, num_slots=2, max_step_tokens=4, max_chunk_tokens=1)
    engine.add("decodes", 2, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.add("score", 16, max_tokens=1, ignore_eos=True, priority=1, is_score=True)
    engine.run()
    assert preempted(engine) == ["score"]
    assert engine.answers["score"].logit_positions == list(range(16))


def test_blocks_freed_while_a_plan_is_in_flight_serve_the_next_plan():
    engine = NullEngine(num_blocks=2, num_slots=2)
    engine.add("a", 5, max_tokens=3)
    engine.plan()
    engine.plan()
    engine.scheduler.finish("a", "abort")
    engine.add("b", 5, max_tokens=3)
    assert engine.plan().table_blocks.tolist() == [1, 2]
    engine.run()
    assert engine.tokens("b") == engine.direct("b")
    assert engine.tokens("a") == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_the_smallest_pools_do_not_livelock(num_blocks, depth):
    """Every request may need all blocks; each step plans at least one token or a prefill chunk."""
    engine = NullEngine(num_blocks=num_blocks, num_slots=8, max_step_tokens=8, depth=depth)
    for number in range(12):
        engine.add(f"r{number}", 1 + number % 3, max_tokens=22, seed=number, ignore_eos=True, priority=number % 2)
    num_steps = engine.run(max_steps=12 * 24 * 4)
    assert engine.scheduler.num_preemptions > 0
    assert_all_answered(engine)
    recomputed = sum(plan.num_tokens for plan in engine.history) / sum(23 for _ in engine.answers)
    assert recomputed < 2, f"{recomputed:.1f} times the work in {num_steps} steps: requests thrash"
