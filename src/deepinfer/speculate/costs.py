"""StepCosts: how long a step of so many tokens takes, measured at first and corrected by every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
RATE = 0.1  # share of an error that one step corrects
MOST_ERROR = 1.0  # a step may take this many times longer than expected before it counts as disturbed


class StepCosts:
    """Seconds by number of tokens, straight between the measured numbers and beyond the last two.

    counts: ascending numbers of tokens; seconds: measured for each of them.
    """

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(counts) == len(seconds) >= 1 and list(counts) == sorted(set(counts)), (counts, seconds)
        self.counts, self.times = np.array(counts, dtype=np.float64), np.array(seconds, dtype=np.float64)

    def seconds(self, num_tokens: NDArray[np.integer] | int) -> Float64:
        """Expected seconds, never less for more tokens."""
        counts, times = self.counts, np.maximum.accumulate(self.times)
        wanted = np.asarray(num_tokens, dtype=np.float64)
        if len(counts) == 1:
            return np.broadcast_to(times[0], wanted.shape)
        slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
        seconds: Float64 = np.interp(wanted, counts, times) + slope * np.maximum(wanted - counts[-1], 0.0)
        return seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; one that was held up by something else counts little."""
        place = int(np.clip(np.searchsorted(self.counts, num_tokens) - 1, 0, max(0, len(self.counts) - 2)))
        expected = float(self.seconds(num_tokens))
        error = min(seconds - expected, MOST_ERROR * expected) * RATE
        if len(self.counts) == 1:
            self.times[0] += error
            return
        low, high = self.counts[place], self.counts[place + 1]
        share = float(np.clip((num_tokens - low) / (high - low), 0.0, 1.0))
        scale = error / ((1 - share) ** 2 + share**2)
        self.times[place] += scale * (1 - share)
        self.times[place + 1] += scale * share
