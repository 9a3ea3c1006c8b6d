"""StepCosts: how long a step of so many tokens takes, measured at first and corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
RATE = 0.1  # share of an error that one step corrects
MOST_ERROR = 1.0  # a step may take this many times longer than expected before it counts as disturbed
LEAST_KEPT = 0.5  # share of a time that one correction leaves
FAR = 1000  # the last slope goes on to this many times the largest measured count


class StepCosts:
    """Seconds by number of tokens, straight between the measured numbers and beyond the last two.

    counts: ascending numbers of tokens, two or more; seconds: measured for each of them. More tokens never
    cost less: a time that is corrected takes those on its other side along.
    """

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(counts) == len(seconds) >= 2 and list(counts) == sorted(set(counts)), (counts, seconds)
        self.counts, self.times = list(counts), np.maximum.accumulate(seconds).tolist()
        self._points = np.array([*counts, FAR * counts[-1]], dtype=np.float64)

    def seconds(self, num_tokens: NDArray[np.integer] | int) -> Float64:
        """Expected seconds."""
        slope = (self.times[-1] - self.times[-2]) / (self.counts[-1] - self.counts[-2])
        far = self.times[-1] + slope * (FAR - 1) * self.counts[-1]
        seconds: Float64 = np.interp(num_tokens, self._points, [*self.times, far])
        return seconds

    def observe(self, num_tokens: int, seconds: float, rate: float = RATE) -> None:
        """A step of so many tokens took so long; one that was held up by something else counts little.

        rate: share of the error that is corrected.
        """
        counts, times = self.counts, self.times
        place = min(max(bisect_left(counts, num_tokens) - 1, 0), len(counts) - 2)
        share = min(max((num_tokens - counts[place]) / (counts[place + 1] - counts[place]), 0.0), 1.0)
        expected = (1 - share) * times[place] + share * times[place + 1]
        step = rate * min(seconds - expected, MOST_ERROR * expected) / ((1 - share) ** 2 + share**2)
        lower = max(times[place] + step * (1 - share), LEAST_KEPT * times[place])
        upper = max(times[place + 1] + step * share, LEAST_KEPT * times[place + 1], lower)
        below, above = times[:place], times[place + 2 :]
        self.times = [*(min(time, lower) for time in below), lower, upper, *(max(time, upper) for time in above)]
