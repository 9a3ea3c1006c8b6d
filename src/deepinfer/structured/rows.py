"""ConstrainedRows: the device thread's side of structured outputs, from a plan to the masks of its rows."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from deepinfer import log
from deepinfer.errors import RequestError
from deepinfer.messages import Int32, SlotSetup
from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.matching import NOBODY, Step
from deepinfer.structured.server import GrammarServer, hang_up
from deepinfer.structured.trigger import Trigger

logger = log.get(__name__)

MAX_LOADED = 64  # grammars that a matcher keeps although no slot uses them
REPLY_SECONDS = 60.0  # a matcher that sleeps longer is given up; one that computes is ended much earlier, by itself


@dataclass(frozen=True)
class RowMasks:
    """Which tokens some lines of a step may take.

    rows: [n] int64, places among the step's lines, ascending. bits: [n, ceil(vocab / 32)] int32,
    see `library.Masks`; valid until the next step. errors: lines whose request cannot go on, and why.
    """

    rows: NDArray[np.int64]
    bits: Int32
    errors: dict[int, str]


@dataclass(slots=True)
class _Answer:
    """One answer under a grammar. tokens: those under the grammar; the matcher has the first num_sent."""

    grammar: CompiledGrammar
    trigger: Trigger
    tokens: list[int] = field(default_factory=list)
    num_sent: int | None = None  # None: the matcher does not have this answer
    error: str | None = None

    @property
    def is_matched(self) -> bool:
        """Whether its masks come from the matcher."""
        return self.trigger.is_active and self.error is None

    def take(self, token: int) -> None:
        if self.trigger.is_active:
            self.tokens.append(token)
        else:
            self.trigger.take(token)


@dataclass(frozen=True, slots=True)
class _Row:
    """One constrained row of a step: its slot, its first line, its number, the drafts that it checks."""

    slot: int
    line: int
    number: int
    drafts: list[int]

    @property
    def num_lines(self) -> int:
        return 1 + len(self.drafts)


class ConstrainedRows:
    """Keeps what each constrained slot has generated, and has its masks filled while the forward runs.

    Used by the device thread: `set_slots`, `limit_drafts`, `begin`, `masks`, `take` once a step, in this order.
    When no slot is constrained each of them is one comparison.

    A row that checks drafts has a mask for each: the one after its newest token, after its first draft, and so on.
    A draft that the grammar forbids cannot be accepted, so what comes after it has no mask.

    The matcher is another process. Should it end (a crash, too much time or memory), it is started
    again, gets the answers that it had, and goes through them one by one; the answer at which it ends
    again is given up, and only this one.
    """

    def __init__(self, server: GrammarServer, num_slots: int, num_drafts: int = 0) -> None:
        """num_drafts: those that a row can check."""
        self._server = server
        self._num_masks = num_slots * (1 + num_drafts)
        self._num_words = -(-server.vocab_size // 32)
        self._answers: dict[int, _Answer] = {}
        self._is_constrained = np.zeros(num_slots + 1, dtype=np.bool_)
        self._rows: list[_Row] = []  # this step's constrained rows
        self._filled: list[_Row] = []  # those whose masks the matcher fills, in order
        self._loaded: set[int] = set()
        self._connection: Connection | None = None
        self._memory: Int32 = np.full(1, NOBODY, dtype=np.int32)
        self._can_end = _bits(self._num_words, server.end_ids)

    def set_slots(self, setups: Sequence[SlotSetup]) -> None:
        """New occupants; a request that comes back after a preemption brings its tokens."""
        for setup in setups:
            self._answers.pop(setup.slot, None)
            constraint = setup.params.constraint
            self._is_constrained[setup.slot] = constraint is not None
            if constraint is not None:
                assert setup.grammar is not None, "a request reached the device before its grammar"
                answer = self._answers[setup.slot] = _Answer(setup.grammar, Trigger(constraint))
                for token in setup.token_ids[setup.num_prompt :].tolist():
                    answer.take(token)

    def limit_drafts(self, slots: Int32, drafts: Int32, room: Int32) -> Int32:
        """Drafts that rows of these slots can check [rows], at most room [rows]: none behind one that starts a grammar.

        drafts: [num_slots + 1, most], of each slot.
        """
        if not self._answers:
            return room
        limited = room.copy()
        for row in np.flatnonzero(self._is_constrained[slots] & (room > 0)).tolist():
            answer = self._answers[int(slots[row])]
            if not answer.trigger.is_active:
                limited[row] = _count_before_start(answer.trigger, drafts[slots[row]][: room[row]].tolist())
        return limited

    def begin(self, slots: Int32, counts: Int32, drafts: Int32 | None) -> None:
        """Send the matcher what it needs for a step's draws; returns before it has done anything.

        slots, counts: [rows], the step's `Lines`. drafts: [rows, most], of which a row checks the first counts - 1.
        """
        self._rows = []
        if not self._answers:
            return
        offsets = np.cumsum(counts) - counts
        for row in np.flatnonzero(self._is_constrained[slots]).tolist():
            checked = [] if drafts is None else drafts[row, : counts[row] - 1].tolist()
            self._rows.append(_Row(int(slots[row]), int(offsets[row]), row, checked))
        self._filled = [row for row in self._rows if self._answers[row.slot].is_matched]
        if self._filled:
            self._send(is_careful=False)

    def masks(self) -> RowMasks | None:
        """The masks of the step that `begin` was told of, once they are ready; None when no line needs one."""
        if not self._rows:
            return None
        if self._filled:
            self._await_reply()
        places, end = {}, 0
        for row in self._filled:
            places[row.slot], end = end, end + row.num_lines
        bits = self._mapped(end)
        if len(places) < len(self._rows):
            bits = np.concatenate([self._masks_of(row, bits, places.get(row.slot)) for row in self._rows])
        lines = np.concatenate([row.line + np.arange(row.num_lines) for row in self._rows])
        errors = {row.line: error for row in self._rows if (error := self._answers[row.slot].error) is not None}
        for place in np.flatnonzero(~bits.any(axis=1)).tolist():
            errors.setdefault(int(lines[place]), "the grammar allows none of the model's tokens here; change it")
        return RowMasks(lines.astype(np.int64), bits, errors)

    def take(self, token_ids: Int32, offsets: Int32, num_tokens: Int32) -> None:
        """What the step's rows keep: num_tokens [rows] of the tokens drawn [lines], from offsets [rows] on."""
        for row in self._rows:
            for token in token_ids[offsets[row.number] :][: num_tokens[row.number]].tolist():
                self._answers[row.slot].take(token)

    def _masks_of(self, row: _Row, filled: Int32, place: int | None) -> Int32:
        """Masks [lines, words] of one row; place: its first line among those that the matcher filled, if it did."""
        if place is not None:
            return filled[place : place + row.num_lines]
        trigger, masks = copy.copy(self._answers[row.slot].trigger), [self._mask(self._answers[row.slot].trigger)]
        for token in row.drafts:
            trigger.take(token)
            masks.append(self._mask(trigger))
        return np.stack(masks)

    def _mask(self, trigger: Trigger) -> Int32:
        if trigger.forced_token is not None:
            return _bits(self._num_words, [trigger.forced_token])
        may_end = np.zeros_like(self._can_end) if trigger.must_begin else self._can_end
        return ~self._can_end | may_end

    def _mapped(self, count: int) -> Int32:
        masks: Int32 = self._memory[1:].reshape(-1, self._num_words)
        return masks[:count]

    # -- the matcher process

    def _send(self, *, is_careful: bool) -> None:
        try:
            connection = self._connected()
            connection.send(self._step(is_careful=is_careful))
        except (OSError, RequestError) as error:  # `_await_reply` finds no connection, and tries again
            logger.warning("the grammar matcher cannot be reached (%s)", error)
            self._disconnect()

    def _step(self, *, is_careful: bool) -> Step:
        step = Step(fills=[(row.slot, row.drafts) for row in self._filled], is_careful=is_careful)
        for slot in (row.slot for row in self._filled):
            answer = self._answers[slot]
            if answer.num_sent is None:
                self._load(step, answer.grammar)
                step.opens.append((slot, answer.grammar.number, answer.tokens))
            else:
                step.accepts += [(slot, token) for token in answer.tokens[answer.num_sent :]]
            answer.num_sent = len(answer.tokens)
        return step

    def _load(self, step: Step, grammar: CompiledGrammar) -> None:
        if grammar.number in self._loaded:
            return
        if len(self._loaded) >= MAX_LOADED:
            used = {answer.grammar.number for answer in self._answers.values()}
            step.drops += [number for number in self._loaded if number not in used]
            self._loaded &= used
        step.loads.append((grammar.number, grammar.data))
        self._loaded.add(grammar.number)

    def _await_reply(self) -> None:
        """Wait for the matcher; when it has ended, start again until the answer that ends it is found."""
        for _ in range(2 + len(self._filled)):
            errors = self._reply() if self._filled else {}
            if errors is not None:
                for slot, error in errors.items():
                    self._answers[slot].error = error
                return
            guilty = int(self._memory[0])
            self._disconnect()
            if guilty in [row.slot for row in self._filled]:
                self._give_up(
                    [guilty], "its grammar takes too much time or crashes the grammar library; make it simpler"
                )
            self._send(is_careful=True)
        self._give_up([row.slot for row in self._filled], "the grammar helper process ends again and again")

    def _give_up(self, slots: list[int], error: str) -> None:
        for slot in slots:
            self._answers[slot].error = error
        self._filled = [row for row in self._filled if row.slot not in slots]

    def _reply(self) -> dict[int, str] | None:
        """What the matcher answers; None when it has ended or does not answer."""
        try:
            if self._connection is not None and self._connection.poll(REPLY_SECONDS):
                reply: dict[int, str] = self._connection.recv()
                return reply
        except (EOFError, OSError):
            pass
        return None

    def _connected(self) -> Connection:
        if self._connection is None:
            fd = os.memfd_create("deepinfer-masks")
            try:
                os.ftruncate(fd, 4 * (1 + self._num_masks * self._num_words))
                self._memory = np.frombuffer(mmap.mmap(fd, 0), dtype=np.int32)
                self._memory[0] = NOBODY
                self._connection = self._server.connect(fd)
            finally:
                os.close(fd)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            hang_up(self._connection)
            self._connection = None
        self._loaded.clear()
        for answer in self._answers.values():
            answer.num_sent = None


def _count_before_start(trigger: Trigger, drafts: list[int]) -> int:
    """How many of the drafts come while the grammar is not active yet."""
    trigger = copy.copy(trigger)
    for count, token in enumerate(drafts):
        trigger.take(token)
        if trigger.is_active:
            return count
    return len(drafts)


def _bits(num_words: int, token_ids: Iterable[int]) -> Int32:
    """[num_words] int32 with the bits of these tokens set."""
    flags = np.zeros(32 * num_words, dtype=np.uint8)
    flags[list(token_ids)] = 1
    bits: Int32 = np.packbits(flags, bitorder="little").view(np.int32)
    return bits
