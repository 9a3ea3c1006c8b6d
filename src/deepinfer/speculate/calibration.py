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
        self._num_drafts = num_drafts
        self._seen = np.zeros((num_drafts, NUM_BINS))
        self._accepted = np.zeros((num_drafts, NUM_BINS))
        self._expected = np.zeros((num_drafts, NUM_BINS))  # sums of the estimates at the time
        self._all_seen = np.zeros((num_drafts, NUM_BINS))
        self._all_accepted = np.zeros((num_drafts, NUM_BINS))

    @property
    def error(self) -> float:
        """Mean distance of estimate and outcome over bins, weighted by their drafts (expected calibration error)."""
        return float(np.abs(self._expected - self._all_accepted).sum() / max(1.0, self._all_seen.sum()))

    def chances(self, confidence: NDArray[np.float32]) -> Float64:
        """Probability [rows, drafts] that a draft is accepted if all before it are; raw confidence [rows, drafts]."""
        own, bins = self._binned(confidence)
        places = np.arange(confidence.shape[1])
        seen, accepted = self._seen[places, bins], self._accepted[places, bins]
        chances: Float64 = (accepted + PRIOR * own) / (seen + PRIOR)
        return chances

    def observe(self, confidence: NDArray[np.float32], num_checked: Int32, num_accepted: Int32) -> None:
        """Rows [rows, drafts] checked their first num_checked drafts and accepted num_accepted of them."""
        places = np.arange(confidence.shape[1])
        had_outcome = (places < num_checked[:, None]) & (places <= num_accepted[:, None])
        is_accepted = places < num_accepted[:, None]
        rows, columns = np.nonzero(had_outcome)
        bins = self._binned(confidence)[1][rows, columns]
        estimates = self.chances(confidence)[rows, columns]
        outcome = is_accepted[rows, columns].astype(np.float64)
        for table, values in ((self._seen, 1.0), (self._accepted, outcome), (self._expected, estimates),
                              (self._all_seen, 1.0), (self._all_accepted, outcome)):  # fmt: skip
            np.add.at(table, (columns, bins), values)
        is_full = self._seen > MEMORY
        self._seen[is_full] /= 2
        self._accepted[is_full] /= 2

    def _binned(self, confidence: NDArray[np.float32]) -> tuple[Float64, NDArray[np.intp]]:
        own = 1.0 / (1.0 + np.exp(-np.clip(confidence, -60, 60).astype(np.float64)))
        return own, np.minimum((own * NUM_BINS).astype(np.intp), NUM_BINS - 1)
