"""SlotState: what changes every step, one numpy array per quantity and one entry per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer.messages import Bool, Int32
from deepinfer.sampling.params import MAX_STOP_TOKENS
from deepinfer.scheduler.request import Request


class SlotState:
    """Arrays over slots [num_slots + 1]; entry 0 (padding) is never active.

    is_active: the occupant takes part in planning (it does not after a preemption).
    serial: number of the admission that filled the slot, 0 = empty; tells results of an earlier
        occupant from those of the present one.
    num_computed: positions computed by all plans so far, those in flight included, at most (all
        their drafts accepted).
    num_rows_ahead, num_tokens_ahead: sampling rows in flight, and the tokens that they can give at most.
    prefill_end: positions that prefill computes; from there on it decodes.
    num_known: tokens known to the host, prompt included.
    limit: positions computed at most, see `Request.limit`.

    The newest known token is not computed yet, and each sampling row in flight gives a token at least. So
    once prefill has ended a row begins at num_known - 1 + num_rows_ahead or later, and at
    num_known - 1 + num_tokens_ahead at the latest.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        def integers() -> Int32:
            return np.zeros(num_slots + 1, dtype=np.int32)

        self.is_active = np.zeros(num_slots + 1, dtype=np.bool_)
        self.serial = np.zeros(num_slots + 1, dtype=np.int64)
        self.priority = np.zeros(num_slots + 1, dtype=np.int64)
        self.num_computed = integers()
        self.num_rows_ahead = integers()
        self.num_tokens_ahead = integers()
        self.prefill_end = integers()
        self.num_known = integers()
        self.num_prompt = integers()
        self.limit = integers()
        self.decoder_start = integers()
        self._ignores_eos = np.zeros(num_slots + 1, dtype=np.bool_)
        self._num_stop_tokens = integers()
        self._stop_tokens = np.full((num_slots + 1, MAX_STOP_TOKENS), -1, dtype=np.int32)
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[list(eos_token_ids)] = True

    def occupy(self, slot: int, request: Request, serial: int) -> None:
        """Start a request in a slot: prefill of all its known tokens."""
        self.is_active[slot] = True
        self.serial[slot] = serial
        self.priority[slot] = request.priority
        self.num_computed[slot] = self.num_rows_ahead[slot] = self.num_tokens_ahead[slot] = 0
        self.prefill_end[slot] = self.num_known[slot] = request.num_tokens
        self.num_prompt[slot] = len(request.prompt)
        self.limit[slot] = request.limit
        self.decoder_start[slot] = request.decoder_start
        self._ignores_eos[slot] = request.params.ignore_eos
        stop_tokens = request.params.stop_token_ids
        self._num_stop_tokens[slot] = len(stop_tokens)
        self._stop_tokens[slot] = -1
        self._stop_tokens[slot, : len(stop_tokens)] = stop_tokens

    def vacate(self, slot: int) -> None:
        """Results for the occupant do not count from now on."""
        self.is_active[slot] = False
        self.serial[slot] = 0

    def decoding(self) -> Int32:
        """Slots that can take a decode row, ascending: prefill has ended, the limit is not reached."""
        can_decode = self.num_computed >= self.prefill_end
        can_decode &= self.first_starts < self.limit
        can_decode &= self.is_active
        return np.flatnonzero(can_decode).astype(np.int32)

    @property
    def first_starts(self) -> Int32:
        """Where the next row of each slot can begin at the earliest, once prefill has ended."""
        return self.num_known + (self.num_rows_ahead - 1)

    def in_flight(self, slot: int) -> int:
        """Rows of a slot whose tokens are planned but not known."""
        return int(self.num_rows_ahead[slot])

    def plan_row(self, slots: Int32, counts: Int32) -> None:
        """These slots get a row that gives up to `counts` tokens each."""
        self.num_rows_ahead[slots] += 1
        self.num_tokens_ahead[slots] += counts
        self._bound_computed(slots)

    def take_row(self, slots: Int32, counts: Int32, num_tokens: Int32) -> None:
        """Such rows have given their tokens."""
        self.num_rows_ahead[slots] -= 1
        self.num_tokens_ahead[slots] -= counts
        self.num_known[slots] += num_tokens
        if (num_tokens != counts).any():  # else the rows end where they were planned to
            self._bound_computed(slots)

    def _bound_computed(self, slots: Int32) -> None:
        latest = self.num_known[slots] - 1 + self.num_tokens_ahead[slots]
        self.num_computed[slots] = np.minimum(latest, self.limit[slots])

    def best_first(self, slots: Int32) -> Int32:
        """By right to stay: lower priority number, then more computed tokens, then earlier admission."""
        return slots[np.lexsort((self.serial[slots], -self.num_computed[slots], self.priority[slots]))]

    def ends_answer(self, slots: Int32, tokens: Int32) -> Bool:
        """Which tokens (one per slot) are an end-of-sequence or stop token of their request."""
        ends = self._is_eos[tokens] & ~self._ignores_eos[slots]
        rows = np.flatnonzero(self._num_stop_tokens[slots])
        if len(rows):
            ends[rows] |= (self._stop_tokens[slots[rows]] == tokens[rows, None]).any(axis=1)
        return ends
