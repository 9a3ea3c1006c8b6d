"""Calibration: from the draft head's confidence to the share of such drafts that are accepted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.messages import Int32

Float64 = NDArray[np.float64]
NUM_BINS = 16
PRIOR = 8.0  # drafts that the head's own estimate counts for, in each bin
MEMORY = 2048.0  # drafts after which the older half of a bin's past is forgotten


class Calibration:
    """A running map for each place of a draft, in bins of the head's raw confidence.

    A bin's estimate is the share of its checked drafts that were accepted, mixed with the head's own
    while it has seen few. So no temperature has to be set by hand, and a change of text is followed.
    """

    def __init__(self, num_drafts: int) -> None:
        self._seen = np.zeros((num_drafts, NUM_BINS))
        self._accepted = np.zeros((num_drafts, NUM_BINS))
        self._surplus = np.zeros((num_drafts, NUM_BINS))  # sum of estimates less what was accepted
        self._places = np.arange(num_drafts)
        self._num_observed = 0

    @property
    def error(self) -> float:
        """Mean distance of estimate and outcome over bins, weighted by their drafts (expected calibration error)."""
        return float(np.abs(self._surplus).sum() / max(1, self._num_observed))

    def chances(self, confidence: NDArray[np.float32]) -> Float64:
        """Probability [rows, drafts] that a draft is accepted if all before it are; raw confidence [rows, drafts]."""
        return self._estimates(*_binned(confidence))

    def observe(self, confidence: NDArray[np.float32], num_checked: Int32, num_accepted: Int32) -> None:
        """Rows [rows, drafts] checked their first num_checked drafts and accepted num_accepted of them."""
        own, bins = _binned(confidence)
        num_known = np.minimum(num_checked, num_accepted + 1)  # those behind a refused draft were not put to the test
        is_known = self._places < num_known[:, None]
        where = (self._places * NUM_BINS + bins)[is_known]
        outcome = (self._places < num_accepted[:, None])[is_known].astype(np.float64)
        surplus = self._estimates(own, bins)[is_known] - outcome
        for table, values in ((self._seen, None), (self._accepted, outcome), (self._surplus, surplus)):
            table += np.bincount(where, values, minlength=table.size).reshape(table.shape)
        self._num_observed += len(where)
        is_full = self._seen > MEMORY
        if is_full.any():
            self._seen[is_full] /= 2
            self._accepted[is_full] /= 2

    def _estimates(self, own: Float64, bins: NDArray[np.intp]) -> Float64:
        seen, accepted = self._seen[self._places, bins], self._accepted[self._places, bins]
        estimates: Float64 = (accepted + PRIOR * own) / (seen + PRIOR)
        return estimates


def _binned(confidence: NDArray[np.float32]) -> tuple[Float64, NDArray[np.intp]]:
    """The head's own probabilities, and the bin of each."""
    own: Float64 = 1.0 / (1.0 + np.exp(-confidence.astype(np.float64).clip(-60.0, 60.0)))
    return own, (own * (NUM_BINS * (1 - 1e-12))).astype(np.intp)
