"""One answer under a grammar, as the device thread knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.trigger import Trigger


@dataclass(slots=True)
class Answer:
    """What a constrained slot has generated so far.

    tokens: those under the grammar; the matcher has the first num_sent, None = it does not have this answer.
    num_filled: masks that lie ready: of the next token, of the one after its first draft, and so on.
    """

    grammar: CompiledGrammar
    trigger: Trigger
    tokens: list[int] = field(default_factory=list)
    num_sent: int | None = None
    num_filled: int = 0
    error: str | None = None

    @property
    def is_matched(self) -> bool:
        """Whether its masks come from the matcher."""
        return self.trigger.is_active and self.error is None

    def take(self, token: int) -> None:
        """The answer goes on with this token."""
        self.num_filled = 0
        if self.trigger.is_active:
            self.tokens.append(token)
        else:
            self.trigger.take(token)
