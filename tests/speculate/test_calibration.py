import numpy as np
import pytest

from deepinfer.speculate.calibration import MEMORY, Calibration


def logit(chance):
    return np.log(chance / (1 - chance))


def observe(calibration, random, raw, truth, rows):
    """Rows whose drafts are accepted with the probabilities `truth`, one after the other."""
    confidence = np.tile(np.array(raw, dtype=np.float32), (rows, 1))
    accepted = np.logical_and.accumulate(random.random(confidence.shape) < truth, axis=1).sum(axis=1)
    calibration.observe(confidence, np.full(rows, len(raw)), accepted)


def test_before_anything_is_seen_the_head_s_own_confidence_counts():
    raw = np.array([[logit(0.2), logit(0.9)], [-100.0, 100.0]], dtype=np.float32)
    assert Calibration(2).chances(raw) == pytest.approx(np.array([[0.2, 0.9], [0.0, 1.0]]), abs=1e-6)


def test_estimates_come_to_what_is_seen_at_each_place_by_itself():
    calibration, random = Calibration(2), np.random.default_rng(0)
    raw, truth = [logit(0.9), logit(0.9)], np.array([0.5, 0.8])
    observe(calibration, random, raw, truth, 2000)
    assert calibration.chances(np.array([raw], dtype=np.float32))[0] == pytest.approx(truth, abs=0.05)


def test_only_drafts_that_were_reached_count():
    calibration = Calibration(3)
    raw = np.full((100, 3), logit(0.5), dtype=np.float32)
    # The first was refused, the third not checked.
    calibration.observe(raw, np.full(100, 2), np.zeros(100, dtype=np.int32))
    chances = calibration.chances(raw[:1])[0]
    assert chances[0] < 0.05 and chances[1] == chances[2] == pytest.approx(0.5)


def test_a_change_of_text_is_followed():
    calibration, random = Calibration(1), np.random.default_rng(0)
    for truth in (1.0, 0.1):
        for _ in range(int(3 * MEMORY / 64)):
            observe(calibration, random, [logit(0.7)], np.array([truth]), 64)
    assert calibration.chances(np.array([[logit(0.7)]], dtype=np.float32))[0, 0] < 0.3


def test_the_error_tells_estimates_that_were_wrong():
    right, wrong, random = Calibration(1), Calibration(1), np.random.default_rng(0)
    for _ in range(50):
        observe(right, random, [logit(0.7)], np.array([0.7]), 20)
    confidence = np.full((40, 1), logit(0.95), dtype=np.float32)
    wrong.observe(confidence, np.ones(40, dtype=np.int32), np.zeros(40, dtype=np.int32))
    assert right.error < 0.05 and wrong.error > 0.5
    assert Calibration(1).error == 0.0
