"""Trigger: when in an answer its grammar begins."""

from __future__ import annotations

from deepinfer.structured.grammar import Constraint


class Trigger:
    """Follows an answer until the trigger's tokens have come one after the other. A copy goes its own way.

    forced_token: the only token that may come next, after the bound token was seen; else None.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._tokens = list(constraint.trigger)
        self._bound = constraint.bound_token_id
        self._seen: list[int] = []  # the last ones, as many as the trigger has
        self._forced: list[int] = []  # still to come, the next one last
        self.is_active = not self._tokens
        self.must_begin = constraint.must_begin

    @property
    def forced_token(self) -> int | None:
        return self._forced[-1] if self._forced else None

    def take(self, token: int) -> None:
        """The answer's next token, while the grammar is not active."""
        self._seen = [*self._seen, token][-len(self._tokens) :]
        if self._forced:
            self._forced = self._forced[:-1]
            self.is_active = not self._forced
        elif self._seen == self._tokens:
            self.is_active = True
        elif token == self._bound:
            self._forced = self._tokens[self._tokens.index(token) + 1 :][::-1]
            self.is_active = not self._forced
