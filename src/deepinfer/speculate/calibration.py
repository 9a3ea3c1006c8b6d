"""Calibration: from the signs that a draft comes with to the probability that it is accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.messages import Int32

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
FIRST_WEIGHTS = (0.0, 0.5, 0.5)  # of 1, the head's confidence, the log-odds of its likeliest token
FIRST_INFORMATION = 2.0 * np.eye(3)  # how firmly these are held, in information about the weights
MEMORY = 4096.0  # drafts of a place after which what was learnt from them counts 1/e
MOST_ODDS = 12.0  # log-odds beyond these say no more
NUM_BINS = 16  # of the estimate, for the error
BATCH_ROWS = 64  # rows that one correction takes together
LEAST_SPREAD = 0.01  # of an outcome, so that sure estimates cannot be moved too far at once


class Signs(NamedTuple):
    """What a draft head says of its drafts, each [rows, drafts] float32.

    confidence: the head's own, before its sigmoid. logprob: of the likeliest token of the draft's logits. Both are
    known before the draft is drawn.
    """

    confidence: Float32
    logprob: Float32


class Calibration:
    """Logistic regression for each place of a draft, corrected by one Newton step for every BATCH_ROWS rows.

    It begins with the mean of both signs and follows what is accepted, so no temperature has to be set by
    hand, and a change of text is followed. (Scores to probabilities by logistic regression: Platt, "Probabilistic
    outputs for support vector machines", 1999; the running step with forgetting is that of recursive least squares.)
    """

    def __init__(self, num_drafts: int) -> None:
        self._places = np.arange(num_drafts)
        self._weights = np.tile(np.array(FIRST_WEIGHTS)[:, None], num_drafts)  # [signs, drafts]
        self._information = np.tile(FIRST_INFORMATION, (num_drafts, 1, 1))
        self._surplus = np.zeros(NUM_BINS)  # sum of estimates less what was accepted
        self._num_observed = 0
        self._waiting: list[tuple[Signs, Int32, Int32]] = []
        self._num_waiting = 0

    @property
    def error(self) -> float:
        """Mean distance of estimate and outcome over bins, weighted by their drafts (expected calibration error)."""
        return float(np.abs(self._surplus).sum() / max(1, self._num_observed))

    def chances(self, signs: Signs) -> Float64:
        """Probability [rows, drafts] that a draft is accepted if all before it are."""
        return self._estimates(*_odds(signs))

    def observe(self, signs: Signs, num_checked: Int32, num_accepted: Int32) -> None:
        """Rows [rows, drafts] checked their first num_checked drafts and accepted num_accepted of them."""
        self._waiting.append((signs, num_checked, num_accepted))
        self._num_waiting += len(num_checked)
        if self._num_waiting >= BATCH_ROWS:
            self._correct()

    def _correct(self) -> None:
        """Learn from the rows that wait."""
        signs, checked, accepted = zip(*self._waiting, strict=True)
        self._waiting, self._num_waiting = [], 0
        num_checked, num_accepted = np.concatenate(checked), np.concatenate(accepted)
        odds = _odds(Signs(*(np.concatenate(column) for column in zip(*signs, strict=True))))
        num_known = np.minimum(num_checked, num_accepted + 1)  # those behind a refused draft were not put to the test
        is_known = self._places < num_known[:, None]
        estimates = self._estimates(*odds)
        surplus = np.where(is_known, estimates - (self._places < num_accepted[:, None]), 0.0)
        inputs = np.stack([np.ones_like(estimates), *odds])  # [signs, rows, drafts]
        kept = np.exp(-is_known.sum(axis=0) / MEMORY)[:, None, None]
        self._information = kept * self._information + (1 - kept) * FIRST_INFORMATION
        spread = is_known * np.maximum(estimates * (1.0 - estimates), LEAST_SPREAD)
        self._information += np.einsum("ird,jrd,rd->dij", inputs, inputs, spread)
        slope = np.einsum("ird,rd->di", inputs, surplus)
        self._weights -= np.linalg.solve(self._information, slope[..., None])[..., 0].T
        bins = (estimates * (NUM_BINS * (1 - 1e-12))).astype(np.intp)
        self._surplus += np.bincount(bins.ravel(), surplus.ravel(), minlength=NUM_BINS)
        self._num_observed += int(is_known.sum())

    def _estimates(self, confidence: Float64, logprob: Float64) -> Float64:
        offset, *weights = self._weights
        estimates: Float64 = 1.0 / (1.0 + np.exp(-_bounded(offset + weights[0] * confidence + weights[1] * logprob)))
        return estimates


def _odds(signs: Signs) -> tuple[Float64, Float64]:
    """Both signs as log-odds [rows, drafts]."""
    logprob = np.minimum(signs.logprob.astype(np.float64), -1e-9)
    return _bounded(signs.confidence.astype(np.float64)), _bounded(logprob - np.log(-np.expm1(logprob)))


def _bounded(odds: Float64) -> Float64:
    """Log-odds within MOST_ODDS; what is not a number counts as a sure refusal."""
    bounded: Float64 = np.fmin(np.fmax(odds, -MOST_ODDS), MOST_ODDS)
    return bounded
