"""Stop strings over streamed text.

The answer is cut before the stop string that starts first in the text; if several start there,
the shortest counts. The result depends on the text alone, not on how it was
cut into pieces, and equals a search of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in text that comes in pieces.

    Text that could be the beginning of a stop string is held back until the next pieces decide.
    match: the stop string found, None before; afterwards no more text is let through.
    """

    def __init__(self, stops: Sequence[str], *, keeps_match: bool = False) -> None:
        """keeps_match: the answer is cut behind the stop string instead."""
        self._stops = sorted(stops, key=len)
        self._keeps_match = keeps_match
        self._held = ""
        self._num_early = 0  # characters of `_held` in which no stop string may end
        self.match: str | None = None

    def add(self, text: str, *, may_end: bool = True) -> str:
        """Take the next piece; return the text that is now certain to stay.

        may_end: a stop string that ends in this piece counts.
        """
        if not self._stops:
            return text
        if not text or self.match is not None:
            return ""
        self._held += text
        if not may_end:
            self._num_early = len(self._held)
        found, stop = self._find()
        begun = self._begun(found)
        if begun < found or stop is None:
            return self._release(begun)
        self.match = stop
        return self._release(self._cut(found))

    def flush(self) -> str:
        """No more text comes: return what was held back and stays."""
        if self.match is not None:
            return ""
        found, self.match = self._find()
        return self._release(self._cut(found))

    def _find(self) -> tuple[int, str | None]:
        """Where the first whole stop string starts, and which; the end and None if there is none."""
        found, match = len(self._held), None
        for stop in self._stops:
            start = self._held.find(stop, max(0, self._num_early - len(stop) + 1), found + len(stop) - 1)
            if start >= 0:
                found, match = start, stop
        return found, match

    def _begun(self, limit: int) -> int:
        """Where the first stop string begins that the end of the text leaves open; `limit` if that is earlier."""
        longest = len(self._stops[-1])
        for start in range(max(0, len(self._held) - longest + 1), limit):
            rest = self._held[start:]
            if any(stop.startswith(rest) for stop in self._stops):
                return start
        return limit

    def _cut(self, found: int) -> int:
        """Where the answer ends if the match starts at `found`."""
        return found + len(self.match) if self.match is not None and self._keeps_match else found

    def _release(self, end: int) -> str:
        self._num_early = max(0, self._num_early - end)
        text, self._held = self._held[:end], self._held[end:]
        return text
