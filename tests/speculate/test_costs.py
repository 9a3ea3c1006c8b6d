import numpy as np
import pytest

from deepinfer.speculate.costs import StepCosts


def test_seconds_lie_on_lines_between_the_measured_counts_and_beyond_them():
    costs = StepCosts([1, 4, 16], [1.0, 2.0, 5.0])
    assert costs.seconds(np.array([1, 4, 10, 16, 20])).tolist() == pytest.approx([1.0, 2.0, 3.5, 5.0, 6.0])


def test_more_tokens_never_cost_less():
    assert StepCosts([1, 4, 16], [2.0, 1.0, 1.5]).seconds(np.array([1, 4, 16])).tolist() == [2.0, 2.0, 2.0]


def test_observed_steps_correct_the_times_around_them():
    costs = StepCosts([1, 4, 16], [1.0, 2.0, 5.0])
    for _ in range(200):
        costs.observe(10, 7.0)
    assert float(costs.seconds(10)) == pytest.approx(7.0, rel=1e-3)
    assert float(costs.seconds(1)) == 1.0


def test_steps_that_are_always_faster_than_expected_pull_smaller_ones_down_and_stay_above_zero():
    costs = StepCosts([1, 4, 8, 16], [10.0, 11.0, 12.0, 13.0])
    for _ in range(2000):
        costs.observe(6, 2.0)
    assert float(costs.seconds(6)) == pytest.approx(2.0, rel=1e-3)
    assert (np.diff(costs.times) >= 0).all() and min(costs.times) > 0
    assert float(costs.seconds(1)) <= 2.0


def test_a_time_between_two_that_lie_far_apart_does_not_take_the_smaller_one_to_zero():
    costs = StepCosts([1, 4], [0.001, 100.0])
    for _ in range(10):
        costs.observe(2, 0.0005)
    assert min(costs.times) > 0 and (np.diff(costs.times) >= 0).all()


def test_one_step_that_was_held_up_moves_little():
    costs = StepCosts([1, 4], [1.0, 2.0])
    costs.observe(4, 1000.0)
    assert float(costs.seconds(4)) <= 2.2 + 1e-9


def test_steps_outside_the_measured_counts_correct_the_nearest():
    costs = StepCosts([2, 4], [2.0, 3.0])
    for _ in range(300):
        costs.observe(1, 4.0)
        costs.observe(4, 6.0)
    assert float(costs.seconds(1)) == pytest.approx(4.0, rel=1e-2)
    assert float(costs.seconds(4)) == pytest.approx(6.0, rel=1e-2)
