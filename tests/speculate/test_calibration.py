import numpy as np
import pytest

from deepinfer.speculate.calibration import BATCH_ROWS, MEMORY, Calibration, Signs


def logit(chance):
    return np.log(chance / (1 - chance))


def signs(confidence, chance):
    """Of one row: probabilities that the head's confidence says, and those of the likeliest tokens."""
    return Signs(*(np.array([values], dtype=np.float32) for values in (logit(np.array(confidence)), np.log(chance))))


def rows(one, count):
    return Signs(*(np.tile(values, (count, 1)) for values in one))


def observe(calibration, random, one, truth, count):
    """Rows whose drafts are accepted with the probabilities `truth`, one after the other."""
    num_drafts = one.confidence.shape[1]
    accepted = np.logical_and.accumulate(random.random((count, num_drafts)) < truth, axis=1).sum(axis=1)
    calibration.observe(rows(one, count), np.full(count, num_drafts), accepted)


def test_before_anything_is_seen_the_mean_of_both_signs_counts():
    assert Calibration(2).chances(signs([0.2, 0.9], [0.2, 0.9])) == pytest.approx(np.array([[0.2, 0.9]]), abs=1e-6)
    between = 1 / (1 + np.exp(-(logit(0.2) + logit(0.8)) / 2))
    assert Calibration(1).chances(signs([0.2], [0.8]))[0, 0] == pytest.approx(between, abs=1e-6)


def test_signs_without_bounds_or_meaning_give_probabilities():
    odd = np.array([[-np.inf, np.inf, np.nan, 1e30]], dtype=np.float32)
    logprob = np.array([[0.0, -np.inf, np.nan, -1e-30]], dtype=np.float32)
    calibration = Calibration(4)
    assert calibration.chances(Signs(odd, odd))[0, 2] < 1e-4  # no number: surely refused
    for _ in range(2 * BATCH_ROWS):
        calibration.observe(Signs(odd, logprob), np.array([4]), np.array([4]))
    chances = calibration.chances(Signs(odd, logprob))
    assert ((chances >= 0) & (chances <= 1)).all() and np.isfinite(calibration.error)


def test_estimates_come_to_what_is_seen_at_each_place_by_itself():
    calibration, random = Calibration(2), np.random.default_rng(0)
    one, truth = signs([0.9, 0.9], [0.9, 0.9]), np.array([0.5, 0.8])
    for _ in range(20):
        observe(calibration, random, one, truth, 100)
    assert calibration.chances(one)[0] == pytest.approx(truth, abs=0.05)


@pytest.mark.parametrize("telling", ["confidence", "logprob"])
def test_the_sign_that_tells_more_comes_to_decide(telling):
    calibration, random = Calibration(1), np.random.default_rng(0)
    for _ in range(4000 // 20):
        truth, other = random.uniform(0.02, 0.98, (2, 20, 1))
        told = {"confidence": other, "logprob": other} | {telling: truth}
        drafts = Signs(logit(told["confidence"]).astype(np.float32), np.log(told["logprob"]).astype(np.float32))
        calibration.observe(drafts, np.ones(20, dtype=np.int32), (random.random((20, 1)) < truth).sum(axis=1))
    low, high = (signs([0.1], [0.5]), signs([0.9], [0.5]))
    if telling == "logprob":
        low, high = (signs([0.5], [0.1]), signs([0.5], [0.9]))
    assert calibration.chances(low)[0, 0] < 0.2 and calibration.chances(high)[0, 0] > 0.8


def test_only_drafts_that_were_reached_count():
    calibration, one = Calibration(3), signs([0.5] * 3, [0.5] * 3)
    for _ in range(20):  # the first was refused, the third not checked
        calibration.observe(rows(one, BATCH_ROWS), np.full(BATCH_ROWS, 2), np.zeros(BATCH_ROWS, dtype=np.int32))
    chances = calibration.chances(one)[0]
    assert chances[0] < 0.05 and chances[1] == chances[2] == pytest.approx(0.5)


def test_a_change_of_text_is_followed():
    calibration, random, one = Calibration(1), np.random.default_rng(0), signs([0.7], [0.7])
    for truth in (1.0, 0.1):
        for _ in range(int(3 * MEMORY / 64)):
            observe(calibration, random, one, np.array([truth]), 64)
    assert calibration.chances(one)[0, 0] < 0.2


def test_the_error_tells_estimates_that_were_wrong():
    right, wrong, random = Calibration(1), Calibration(1), np.random.default_rng(0)
    for _ in range(50):
        observe(right, random, signs([0.7], [0.7]), np.array([0.7]), 20)
    wrong.observe(rows(signs([0.95], [0.95]), BATCH_ROWS), np.ones(BATCH_ROWS, dtype=np.int32), np.zeros(BATCH_ROWS))
    assert right.error < 0.05 and wrong.error > 0.5
    assert Calibration(1).error == 0.0
