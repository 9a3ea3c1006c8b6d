import itertools

import numpy as np
import pytest

from deepinfer.speculate.calibration import Signs
from deepinfer.speculate.costs import StepCosts
from deepinfer.speculate.policy import (
    DRAFTED_STEPS,
    FEED_STEPS,
    FIRST_PROBE,
    LOOK_STEPS,
    PROBE_STEPS,
    TRIED_STEPS,
    CheckAll,
    CheckWorthwhile,
)

FREE = StepCosts([1, 1000], [1.0, 1.0])  # memory bound: more tokens cost nothing
LINEAR = StepCosts([1, 1000], [1.0, 1000.0])  # compute bound
NO_COST = StepCosts([1, 2], [0.0, 0.0])


def signs(chances):
    """Both signs say these probabilities."""
    chances = np.clip(np.array(chances), 1e-9, 1 - 1e-9)
    return Signs(np.log(chances / (1 - chances)).astype(np.float32), np.log(chances).astype(np.float32))


def int32(*values):
    return np.array(values, dtype=np.int32)


def choose(policy, drafts, room, num_other, num_useful=None):
    """No draft ends an answer unless num_useful says so."""
    useful = np.full(len(room), drafts.confidence.shape[1], dtype=np.int32) if num_useful is None else num_useful
    return policy.choose(drafts, room, useful, num_other)


def test_check_all_takes_all_the_room():
    assert choose(CheckAll(), signs([[0.1, 0.1]] * 3), int32(2, 0, -1), 5).tolist() == [2, 0, -1]
    assert CheckAll().wants_drafts(1000)


def test_everything_is_checked_when_it_costs_nothing_and_nothing_when_each_token_costs_a_token():
    drafts, room = signs([[0.9, 0.5, 0.1]] * 2), int32(3, 2)
    assert choose(CheckWorthwhile(3, FREE, NO_COST), drafts, room, 0).tolist() == [3, 2]
    assert choose(CheckWorthwhile(3, LINEAR, NO_COST), drafts, room, 0).tolist() == [0, 0]


def test_rows_past_their_limit_stay_out():
    chosen = choose(CheckWorthwhile(2, FREE, NO_COST), signs([[0.9, 0.9]] * 3), int32(2, -1, 0), 0)
    assert chosen.tolist() == [2, -1, 0]
    assert choose(CheckWorthwhile(2, FREE, NO_COST), signs([[0.9, 0.9]]), int32(-1), 0).tolist() == [-1]


def test_the_choice_is_the_best_of_all_possible_ones():
    random = np.random.default_rng(0)
    for _ in range(60):
        costs = StepCosts([1, 3, 6, 12], np.cumsum(random.random(4) + 0.05).tolist())
        drafting = StepCosts([1, 2], [float(random.random())] * 2)
        chances, room, num_other = random.random((3, 3)), random.integers(-1, 4, 3), int(random.integers(0, 4))
        chosen = choose(CheckWorthwhile(3, costs, drafting), signs(chances), room.astype(np.int32), num_other)
        survival = chances.cumprod(axis=1)

        def rate(counts, survival=survival, costs=costs, drafting=drafting, room=room, num_other=num_other):
            rows = int((room >= 0).sum())
            gained = rows + sum(survival[row, : max(count, 0)].sum() for row, count in enumerate(counts))
            tokens = num_other + rows + sum(max(count, 0) for count in counts)
            return gained / float(costs.seconds(tokens) + drafting.seconds(rows))

        possible = itertools.product(*(range(max(one, 0) + 1) for one in room.tolist()))
        if (room >= 0).any():
            assert rate(chosen.tolist()) == pytest.approx(max(rate(counts) for counts in possible), rel=1e-5)


def test_a_row_s_choice_does_not_rest_on_what_comes_after_it():
    """The chance of later drafts moves how many of those are checked, not the survivals of those before."""
    policy = CheckWorthwhile(3, FREE, NO_COST)
    for last in (0.01, 0.99):
        assert choose(policy, signs([[0.9, 0.8, last]]), int32(2), 0).tolist() == [2]


def test_nothing_behind_the_end_of_an_answer_is_checked_or_expected():
    policy = CheckWorthwhile(3, FREE, NO_COST)
    drafts, room = signs([[0.9, 0.9, 0.9]] * 2), int32(3, 3)
    assert choose(policy, drafts, room, 0, int32(1, 3)).tolist() == [1, 3]
    assert policy._mean_survival == pytest.approx([0.9, 0.9**2 / 2, 0.9**3 / 2])
    assert choose(CheckAll(), drafts, room, 0, int32(1, 3)).tolist() == [3, 3]


def test_drafting_stops_when_it_does_not_pay_and_is_tried_less_and_less_often():
    policy = CheckWorthwhile(2, LINEAR, StepCosts([1, 2], [0.5, 0.5]))
    rests = [FIRST_PROBE, 2 * FIRST_PROBE, 4 * FIRST_PROBE, 8 * FIRST_PROBE, PROBE_STEPS, PROBE_STEPS]
    for rest in rests:
        wanted = [policy.wants_drafts(4) for _ in range(TRIED_STEPS + rest)]
        assert wanted == [True] * TRIED_STEPS + [False] * rest
    assert FIRST_PROBE == 64 and PROBE_STEPS == 1024


@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_times_measured_under_a_load_are_found_wrong_soon(factor):
    """Drafting really takes a third of a step and all drafts are accepted; the table says `factor` times that."""
    policy = CheckWorthwhile(3, StepCosts([1, 4, 16], [1.0, factor, 2 * factor]), StepCosts([1, 4], [factor, factor]))
    drafts, drafted = signs([[0.9, 0.9, 0.9]]), []
    for _ in range(6 * FIRST_PROBE):
        chosen = choose(policy, drafts, int32(3), 0) if drafted and drafted[-1] else int32(0)
        if policy.feeds_head:
            drafted.append(policy.wants_drafts(1))
            policy.observe_step(1 + int(chosen[0]), 1.0 + 0.01 * chosen[0])
            if drafted[-1]:
                policy.observe_drafting(1, 0.3)
        else:
            policy.rest(1, 1.0)
            drafted.append(False)
    assert sum(drafted[-FIRST_PROBE:]) >= FIRST_PROBE - 2, "it pays, and that is known"


def test_one_step_in_many_decodes_plainly_to_know_its_time():
    policy = CheckWorthwhile(3, FREE, NO_COST)
    choose(policy, signs([[0.9, 0.9, 0.9]]), int32(3), 0)
    wanted = [policy.wants_drafts(1) for _ in range(2 * (DRAFTED_STEPS + 1))]
    assert wanted == [*[True] * DRAFTED_STEPS, False] * 2
    assert policy.feeds_head, "the head reads along, since drafting goes on"


def test_drafting_begins_again_at_once_when_the_load_falls():
    costs = StepCosts([1, 8, 64, 512], [1.0, 1.1, 8.0, 64.0])  # free at first, then a token costs a token
    policy = CheckWorthwhile(3, costs, StepCosts([1, 64], [0.1, 6.0]))
    for _ in range(20):
        choose(policy, signs([[0.9, 0.9, 0.9]] * 2), int32(3, 3), 0)
    assert all(policy.wants_drafts(2) for _ in range(TRIED_STEPS))
    assert not any(policy.wants_drafts(64) for _ in range(FIRST_PROBE - 1))
    assert policy.wants_drafts(2)


def test_the_time_of_the_one_plain_step_counts_for_more():
    policy = CheckWorthwhile(3, StepCosts([1, 4], [1.0, 1.0]), NO_COST)
    choose(policy, signs([[0.9, 0.9, 0.9]]), int32(3), 0)
    while policy.wants_drafts(1):
        policy.observe_step(4, 1.0)
    policy.observe_step(4, 1.0)
    assert policy.wants_drafts(1)
    policy.observe_step(1, 0.6)
    assert float(policy.step_costs.seconds(1)) == pytest.approx(0.8)
    assert policy.wants_drafts(1)
    policy.observe_step(1, 0.6)
    assert float(policy.step_costs.seconds(1)) == pytest.approx(0.78)


def resting():
    """A policy that drafts for 2 rows and not for 64, after some plain steps of 64."""
    policy = CheckWorthwhile(3, StepCosts([1, 8, 64, 512], [1.0, 1.1, 8.0, 64.0]), StepCosts([1, 64], [0.1, 6.0]))
    for _ in range(20):
        choose(policy, signs([[0.9, 0.9, 0.9]] * 2), int32(3, 3), 0)
    assert all(policy.wants_drafts(2) for _ in range(TRIED_STEPS)) and not policy.wants_drafts(64)
    policy.rest(64, 8.0)
    return policy


def test_plain_steps_are_looked_at_now_and_then_and_when_their_rows_change():
    policy = resting()
    for _ in range(2 * LOOK_STEPS):
        policy.rest(64, 16.0)
    assert float(policy.step_costs.seconds(64)) == pytest.approx(16.0 - 8.0 * 0.9**2)
    assert not policy.feeds_head
    for _ in range(3):  # as many plain plans are on their way
        policy.rest(2, 1.0)
        assert policy.feeds_head
    assert policy.wants_drafts(2)


def test_the_head_reads_along_before_drafts_are_tried_again():
    policy = resting()
    assert FIRST_PROBE - FEED_STEPS - 5 < num_rests(policy) <= FIRST_PROBE - FEED_STEPS
    wanted = [policy.wants_drafts(64) for _ in range(FEED_STEPS + 1 + TRIED_STEPS)]
    assert wanted.count(True) == TRIED_STEPS and wanted.index(True) == FEED_STEPS


def num_rests(policy):
    """Plain steps until the policy wants more than these."""
    for count in range(2 * PROBE_STEPS):
        if policy.feeds_head:
            return count
        policy.rest(64, 8.0)
    return None


def test_drafts_that_are_refused_again_and_again_are_no_longer_checked():
    policy = CheckWorthwhile(2, StepCosts([1, 100], [1.0, 10.0]), NO_COST)
    drafts, room = signs([[0.9, 0.9]]), int32(2)
    assert choose(policy, drafts, room, 0).tolist() == [2]
    for _ in range(300):
        policy.observe(drafts, int32(2), int32(0))
    assert choose(policy, drafts, room, 0).tolist() == [0]
    assert policy.calibration_error > 0.0
