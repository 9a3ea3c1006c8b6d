"""ConstrainedRows: the device thread's side of structured outputs, from a plan to the masks of its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.messages import Int32, SlotSetup
from deepinfer.structured.answer import Answer
from deepinfer.structured.link import MatcherLink, ranges
from deepinfer.structured.server import GrammarServer
from deepinfer.structured.trigger import Trigger


@dataclass(frozen=True)
class RowMasks:
    """Which tokens some lines of a step may take.

    rows: [n] int64, places among the step's lines, ascending. bits: [n, ceil(vocab / 32)] int32,
    see `library.Masks`. errors: lines whose request cannot go on, and why.
    """

    rows: NDArray[np.int64]
    bits: Int32
    errors: dict[int, str]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The constrained rows of a step: their numbers, slots and first lines [n], and the drafts that each checks."""

    numbers: NDArray[np.int64]
    slots: Int32
    firsts: NDArray[np.int64]
    drafts: list[list[int]]


class ConstrainedRows:
    """Keeps what each constrained slot has generated, and has its masks filled while the forward runs.

    Used by the device thread: `set_slots`, `limit_drafts`, `begin`, `masks`, `take` once a step, in this order, and
    `draft_masks` once for each draft of the next step. When no slot is constrained each of them is one comparison.

    A row that checks drafts has a mask for each: the one after its newest token, after its first draft, and so on.
    All but the last were filled when the drafts were drawn. A draft that the grammar forbids cannot be accepted,
    so what comes after it has no mask.
    """

    def __init__(self, server: GrammarServer, num_slots: int, num_drafts: int = 0) -> None:
        """num_drafts: those that a row can check."""
        self._num_words = -(-server.vocab_size // 32)
        self._answers: dict[int, Answer] = {}
        self._is_constrained = np.zeros(num_slots + 1, dtype=np.bool_)
        self._rows: _Rows | None = None  # of this step
        self._link = MatcherLink(server, self._answers, num_slots, num_drafts)
        everything = np.full(self._num_words, -1, dtype=np.int32)
        self._free, self._without_end = everything, everything & ~_bits(self._num_words, server.end_ids)

    def set_slots(self, setups: Sequence[SlotSetup]) -> None:
        """New occupants; a request that comes back after a preemption brings its tokens."""
        for setup in setups:
            self._answers.pop(setup.slot, None)
            constraint = setup.params.constraint
            self._is_constrained[setup.slot] = constraint is not None
            if constraint is not None:
                assert setup.grammar is not None, "a request reached the device before its grammar"
                answer = self._answers[setup.slot] = Answer(setup.grammar, Trigger(constraint))
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
        self._rows = None
        if not self.has_any(slots):
            return
        numbers = np.flatnonzero(self._is_constrained[slots])
        checked: list[list[int]] = [[] for _ in numbers]
        if drafts is not None:
            checked = [drafts[number, : counts[number] - 1].tolist() for number in numbers.tolist()]
        self._rows = _Rows(numbers, slots[numbers], (np.cumsum(counts) - counts)[numbers], checked)
        self._ask(self._rows.slots, checked)

    def masks(self) -> RowMasks | None:
        """The masks of the step that `begin` was told of, once they are ready; None when no line needs one."""
        rows = self._rows
        if rows is None:
            return None
        self._link.wait()
        bits = self._bits(rows.slots, rows.drafts, np.zeros_like(rows.numbers))
        lines = ranges(rows.firsts, np.array([1 + len(drafts) for drafts in rows.drafts]))
        errors = {}
        for line, slot in zip(rows.firsts.tolist(), rows.slots.tolist(), strict=True):
            if (error := self._answers[slot].error) is not None:
                errors[line] = error
        for place in np.flatnonzero(~bits.any(axis=1)).tolist():
            errors.setdefault(int(lines[place]), "the grammar allows none of the model's tokens here; change it")
        return RowMasks(lines, bits, errors)

    def take(self, token_ids: Int32, offsets: Int32, num_tokens: Int32) -> None:
        """What the step's rows keep: num_tokens [rows] of the tokens drawn [lines], from offsets [rows] on."""
        if self._rows is None:
            return
        tokens, numbers = token_ids.tolist(), self._rows.numbers
        starts, ends = offsets[numbers].tolist(), (offsets + num_tokens)[numbers].tolist()
        for slot, start, end in zip(self._rows.slots.tolist(), starts, ends, strict=True):
            for token in tokens[start:end]:
                self._answers[slot].take(token)

    def has_any(self, slots: Int32) -> bool:
        """Whether any of these slots has a grammar."""
        return bool(self._answers) and bool(self._is_constrained[slots].any())

    def draft_masks(self, slots: Int32, drafts: Int32) -> RowMasks:
        """Masks of the draft that follows these drafts [rows, n] of some slots [rows]; waits for them.

        rows: those among the slots whose grammar says anything; what is wrong with a grammar is said by `masks`.
        """
        rows = np.flatnonzero(self._is_constrained[slots])
        known = [drafts[row].tolist() for row in rows.tolist()]
        self._ask(slots[rows], known)
        self._link.wait()
        bits = self._bits(slots[rows], known, np.full(len(rows), drafts.shape[1]))
        allows_any = bits.any(axis=1)
        return RowMasks(rows[allows_any], bits[allows_any], {})

    def _ask(self, slots: Int32, drafts: list[list[int]]) -> None:
        """Have the matcher fill the masks of those of these slots that it knows."""
        pairs = zip(slots.tolist(), drafts, strict=True)
        self._link.begin([pair for pair in pairs if self._answers[pair[0]].is_matched])

    def _bits(self, slots: Int32, drafts: list[list[int]], firsts: NDArray[np.int64]) -> Int32:
        """Masks [n, words] of these slots: after the first `firsts` of its drafts, ..., after all of them."""
        counts = np.array([1 + len(own) for own in drafts]) - firsts
        is_matched = np.array([self._answers[slot].is_matched for slot in slots.tolist()])
        if is_matched.all():
            return self._link.masks(slots, firsts, counts)
        ends = np.cumsum(counts)
        bits: Int32 = np.empty((ends[-1], self._num_words), dtype=np.int32)
        if is_matched.any():
            places = ranges((ends - counts)[is_matched], counts[is_matched])
            bits[places] = self._link.masks(slots[is_matched], firsts[is_matched], counts[is_matched])
        for row in np.flatnonzero(~is_matched).tolist():
            trigger = copy.copy(self._answers[int(slots[row])].trigger)
            masks = [self._mask(trigger)]
            for token in drafts[row]:
                trigger.take(token)
                masks.append(self._mask(trigger))
            bits[ends[row] - counts[row] : ends[row]] = masks[firsts[row] :]
        return bits

    def _mask(self, trigger: Trigger) -> Int32:
        if trigger.forced_token is not None:
            return _bits(self._num_words, [trigger.forced_token])
        return self._without_end if trigger.must_begin else self._free


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
