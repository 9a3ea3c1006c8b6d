"""The work of the matcher process: answers under a grammar, one per slot."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.structured.library import GrammarLibrary, Matcher

ROW_SECONDS = 0.2  # of processor time that one answer may take in one step
LOAD_ROWS = 8  # times as long for loading a grammar: compiling it, loading included, took less
REPLAY_ROWS = 0.05  # times as long for each token of an answer that is replayed
NOBODY = -1


@dataclass(slots=True)
class Step:
    """What the matcher does before one draw, in this order. Of plain tuples, since it is sent with each draw.

    number: comes back with the answer.
    loads: grammars that it does not have yet. drops: grammars that it may forget.
    opens: slot, grammar number, tokens so far; the slot has a new answer.
    accepts: slot, next token, several of one slot in order.
    fills: slot, line, drafts, first: masks of the token after the slot's first `first` drafts, ..., of the one after
        all of them. The one after n drafts is to lie n lines behind `line` in memory.
    is_careful: one answer after the other, so that it is known which one goes wrong.
    """

    number: int = 0
    loads: list[tuple[int, bytes]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    opens: list[tuple[int, int, list[int]]] = field(default_factory=list)
    accepts: list[tuple[int, int]] = field(default_factory=list)
    fills: list[tuple[int, int, list[int], int]] = field(default_factory=list)
    is_careful: bool = False


@dataclass(slots=True)
class _Walk:
    """A matcher on its way along the drafts of a fill."""

    matcher: Matcher
    line: int
    drafts: list[int]
    first: int
    num_accepted: int = 0


class MatcherState:
    """Matchers by slot; writes masks into shared memory.

    memory: [1 + lines * words] int32; the first entry says whose turn it is (NOBODY = all
        together), and is what the engine reads when this process has ended early.
    """

    def __init__(self, library: GrammarLibrary, memory: NDArray[np.int32]) -> None:
        self._library = library
        self._turn = memory[:1]
        self._masks = memory[1:].reshape(-1, library.num_words)
        self._grammars: dict[int, Any] = {}
        self._matchers: dict[int, Matcher] = {}

    def run(self, step: Step) -> dict[int, str]:
        """Carry out a step. Returns what went wrong, by slot; such a slot has no matcher any more.

        Processor time beyond `ROW_SECONDS` per answer, and what is added for loads and replays, ends the
        process (SIGPROF).
        """
        errors: dict[int, str] = {}
        try:
            self._run(step, errors)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return errors

    def _run(self, step: Step, errors: dict[int, str]) -> None:
        users = {number: slot for slot, number, _ in step.opens}
        for number, data in step.loads:
            self._limit(users.get(number, NOBODY), LOAD_ROWS)
            self._grammars[number] = self._library.load(data)
        for number in step.drops:
            self._grammars.pop(number, None)
        for slot, number, tokens in step.opens:
            self._limit(slot, 1 + REPLAY_ROWS * len(tokens))
            self._matchers[slot] = self._library.matcher(self._grammars[number])
            self._accept([(slot, token) for token in tokens], errors)
        if step.is_careful:
            for line in step.accepts:
                self._limit(line[0], 1)
                self._accept([line], errors)
            for fill in step.fills:
                self._limit(fill[0], _num_masks([fill]))
                self._fill([fill])
        else:
            self._limit(NOBODY, 1 + len(step.accepts) + _num_masks(step.fills))
            self._accept(step.accepts, errors)
            self._fill(step.fills)

    def _limit(self, slot: int, num_rows: float) -> None:
        self._turn[0] = slot
        signal.setitimer(signal.ITIMER_PROF, ROW_SECONDS * num_rows)

    def _accept(self, lines: list[tuple[int, int]], errors: dict[int, str]) -> None:
        """An answer that ends, or goes on with what its grammar forbids, has no matcher any more.

        Tokens after the end of an answer come from rows planned ahead; they change nothing.
        """
        matchers = self._matchers
        for slot, token in lines:
            matcher = matchers.get(slot)
            if matcher is None:
                continue
            if not matcher.accept(token):
                errors[slot] = f"the grammar does not allow token {token}, which was generated"
                del matchers[slot]
            elif matcher.is_ended:
                del matchers[slot]

    def _fill(self, fills: list[tuple[int, int, list[int], int]]) -> None:
        """Write masks, those after as many drafts in one call.

        Masks of ended and of failed answers, and those behind a draft that is not allowed, allow everything: nobody
        will read what is drawn.
        """
        walks, matchers, lines = [], [], []
        for slot, line, drafts, first in fills:
            if (matcher := self._matchers.get(slot)) is None:
                self._masks[line + first : line + len(drafts) + 1] = -1
            elif drafts:
                walks.append(_Walk(matcher, line, drafts, first))
            else:
                matchers.append(matcher)
                lines.append(line)
        if matchers:
            self._library.fill_all(matchers, self._masks, lines)
        now, place = walks, 0
        while now:
            if wanted := [walk for walk in now if walk.first <= place]:
                lines = [walk.line + place for walk in wanted]
                self._library.fill_all([walk.matcher for walk in wanted], self._masks, lines)
            now = [walk for walk in now if place < len(walk.drafts) and self._goes_on(walk, place)]
            place += 1
        for walk in walks:
            if walk.num_accepted:
                walk.matcher.rollback(walk.num_accepted)

    def _goes_on(self, walk: _Walk, place: int) -> bool:
        """Whether there are masks behind the draft at this place."""
        is_accepted = walk.matcher.accept(walk.drafts[place])
        walk.num_accepted += is_accepted
        if is_accepted and not walk.matcher.is_ended:
            return True
        self._masks[walk.line + max(place + 1, walk.first) : walk.line + len(walk.drafts) + 1] = -1
        return False


def _num_masks(fills: list[tuple[int, int, list[int], int]]) -> int:
    return sum([len(drafts) + 1 - first for _, _, drafts, first in fills])
