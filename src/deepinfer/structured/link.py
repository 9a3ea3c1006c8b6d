"""MatcherLink: the device thread's end of the matcher process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import log
from deepinfer.errors import RequestError
from deepinfer.messages import Int32
from deepinfer.structured.answer import Answer
from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.matching import NOBODY, Step
from deepinfer.structured.server import GrammarServer, hang_up

logger = log.get(__name__)

MAX_LOADED = 64  # grammars that a matcher keeps although no slot uses them
TOO_MUCH = "its grammar takes too much time or crashes the grammar library; make it simpler"
REPLY_SECONDS = 60.0  # a matcher that sleeps longer is given up; one that computes is ended much earlier, by itself


class MatcherLink:
    """Has masks filled, in memory that both processes see: a line for each slot and number of drafts.

    Should the matcher end (a crash, too much time or memory), it is started again, gets the answers that it
    had, and goes through them one by one; the answer at which it ends twice is given up, and only this one.
    """

    def __init__(self, server: GrammarServer, answers: Mapping[int, Answer], num_slots: int, num_drafts: int) -> None:
        """answers: by slot; errors and what lies ready are written there."""
        self._server, self._answers = server, answers
        self._num_places, self._num_lines = 1 + num_drafts, (num_slots + 1) * (1 + num_drafts)
        self._num_words = -(-server.vocab_size // 32)
        self._wanted: list[tuple[int, list[int]]] = []
        self._number = 0  # of the last step that was sent
        self._loaded: set[int] = set()
        self._connection: Connection | None = None
        self._memory: Int32 = np.full(1, NOBODY, dtype=np.int32)

    def begin(self, wanted: list[tuple[int, list[int]]]) -> None:
        """Have masks filled for these slots: of the next token, and of the one after each of these drafts.

        Masks that lie ready stay. Returns before anything is done; `wait` follows.
        """
        self._wanted = wanted
        if missing := self._missing():
            self._send(missing, is_careful=False)

    def wait(self) -> None:
        """Wait for the masks that `begin` asked for. Afterwards each of these answers has them, or an error."""
        suspects: set[int] = set()
        for _ in range(2 + 2 * len(self._wanted)):
            missing = self._missing()
            if not missing:
                return
            errors = self._reply()
            if errors is not None:
                for slot, drafts in missing:
                    self._answers[slot].num_filled = 1 + len(drafts)
                for slot, error in errors.items():
                    self._answers[slot].error = error
                return
            guilty = int(self._memory[0])
            self._disconnect()
            if guilty in suspects:
                self._answers[guilty].error = TOO_MUCH
            elif guilty in [slot for slot, _ in self._wanted]:
                suspects.add(guilty)
            self._send(self._missing(), is_careful=True)
        for slot, _ in self._missing():
            self._answers[slot].error = "the grammar helper process ends again and again"

    def masks(self, slots: Int32, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> Int32:
        """`counts` [n] masks of some slots [n], from the one behind their first `firsts` [n] drafts on.

        One slot after the other, [masks, words], a copy; see `library.Masks`.
        """
        lines: Int32 = self._memory[1:].reshape(-1, self._num_words)
        masks: Int32 = lines[ranges(slots * self._num_places + firsts, counts)]
        return masks

    def _missing(self) -> list[tuple[int, list[int]]]:
        """What is wanted and not there yet."""
        answers = self._answers
        return [
            (slot, drafts)
            for slot, drafts in self._wanted
            if answers[slot].is_matched and answers[slot].num_filled <= len(drafts)
        ]

    def _send(self, missing: list[tuple[int, list[int]]], *, is_careful: bool) -> None:
        try:
            connection = self._connected()
            connection.send(self._step(missing, is_careful=is_careful))
        except (OSError, RequestError) as error:  # `wait` finds no connection, and tries again
            logger.warning("the grammar matcher cannot be reached (%s)", error)
            self._disconnect()

    def _step(self, missing: list[tuple[int, list[int]]], *, is_careful: bool) -> Step:
        self._number += 1
        step = Step(self._number, is_careful=is_careful)
        for slot, drafts in missing:
            answer = self._answers[slot]
            step.fills.append((slot, slot * self._num_places, drafts, answer.num_filled))
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

    def _reply(self) -> dict[int, str] | None:
        """What the matcher answers; None when it has ended or does not answer.

        An answer to an earlier step, for which nobody has waited since its forward failed, is none either: what was
        wrong in that step would be lost.
        """
        try:
            if self._connection is not None and self._connection.poll(REPLY_SECONDS):
                errors: dict[int, str]
                number, errors = self._connection.recv()
                return errors if number == self._number else None
        except (EOFError, OSError):
            pass
        return None

    def _connected(self) -> Connection:
        if self._connection is None:
            fd = os.memfd_create("deepinfer-masks")
            try:
                os.ftruncate(fd, 4 * (1 + self._num_lines * self._num_words))
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
            answer.num_sent, answer.num_filled = None, 0


def ranges(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """counts [n] numbers from starts [n] on, one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
