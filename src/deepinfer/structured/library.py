"""What a grammar library must offer; the helper processes know it by this only.

`xgrammar_library.py` is the one in use. Another (llguidance, say) takes one such file, and the rules
of `json_schema.py` for what it enforces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.structured.grammar import Grammar

Masks = NDArray[np.int32]  # [rows, ceil(vocab / 32)]; bit i of word w stands for token 32 w + i, 1 = allowed


class Matcher(Protocol):
    """How far one answer has come in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Take the answer's next token; False, without a change, when the grammar forbids it."""

    def fill(self, masks: Masks, row: int) -> None:
        """Write which tokens may come next into masks[row]; end tokens exactly when the grammar can end."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""

    @property
    def is_ended(self) -> bool:
        """Whether an end token was accepted; then neither `accept` nor `fill` is called any more."""


class GrammarLibrary(Protocol):
    """Compiles grammars for one vocabulary. num_words: int32 words of one mask."""

    num_words: int

    def compile(self, grammar: Grammar) -> bytes:
        """A form that `matcher` takes. Raises RequestError for a grammar that cannot be used."""

    def load(self, data: bytes) -> Any:
        """What `compile` gave, ready for matchers; several share it."""

    def matcher(self, loaded: Any) -> Matcher:
        """A matcher at the start of the grammar."""

    def fill_all(self, matchers: Sequence[Any], masks: Masks, rows: Sequence[int]) -> None:
        """`fill` of these rows of `masks`, one for each matcher, in one call."""
