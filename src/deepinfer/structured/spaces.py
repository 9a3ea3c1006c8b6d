"""A bound on the spaces between the parts of a JSON text, kept beside the grammar.

xgrammar can count them too, but where counted spaces may stand, it has to try each token that starts with one while
it fills a mask; where any number may, it knows them from compiling.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IN_STRING, ESCAPED = -1, -2  # states beside the number of spaces just written outside of strings
SPACES, QUOTE, BACKSLASH = b" \n\r\t", ord('"'), ord("\\")
PLAIN, SPACED, OTHER = range(3)  # tokens: of other characters only; with spaces; with quotes and backslashes


class SpaceLimit:
    """At most `most` spaces and line breaks in a row, for one vocabulary. The state of an empty text is 0.

    Any state below zero but ESCAPED means the same as IN_STRING.
    """

    def __init__(self, vocabulary: list[bytes], num_words: int, most: int) -> None:
        self._vocabulary = vocabulary + [b""] * (32 * num_words - len(vocabulary))  # the model's ids may be padded
        self._most = most
        self._leading = np.array([len(text) - len(text.lstrip(SPACES)) for text in self._vocabulary])
        long_run = re.compile(rb"[ \n\r\t]{%d}" % (most + 1))
        self._long = [token for token, text in enumerate(vocabulary) if len(text) > most and long_run.search(text)]
        self._kinds = bytes(map(_kind, self._vocabulary))
        self._counted = lru_cache(maxsize=2**16)(self._after)
        self.mask = lru_cache(maxsize=None)(self._mask)

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None when it writes too many spaces."""
        kind = self._kinds[token_id]
        if kind == PLAIN or kind == SPACED and state < 0:
            return IN_STRING if state < 0 else 0
        return self._counted(state, token_id)

    def _after(self, state: int, token_id: int) -> int | None:
        """`after`, byte by byte."""
        for byte in self._vocabulary[token_id]:
            if state >= 0:
                state = state + 1 if byte in SPACES else IN_STRING if byte == QUOTE else 0
                if state > self._most:
                    return None
            elif state == ESCAPED:
                state = IN_STRING
            elif byte in (QUOTE, BACKSLASH):
                state = 0 if byte == QUOTE else ESCAPED
        return state

    def _mask(self, state: int) -> NDArray[np.int32] | None:
        """[words] the tokens that do not write too many spaces; None when these are all."""
        is_excluded = (self._leading > self._most - state) if state >= 0 else np.zeros(len(self._leading), dtype=bool)
        is_excluded[[token for token in self._long if self._after(state, token) is None]] = True
        return np.packbits(~is_excluded, bitorder="little").view(np.int32) if is_excluded.any() else None


def _kind(text: bytes) -> int:
    if not text or b'"' in text or b"\\" in text:
        return OTHER
    return SPACED if re.search(rb"[ \n\r\t]", text) else PLAIN
