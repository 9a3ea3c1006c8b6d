"""`bad_words`: token sequences that an answer must not complete."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup, TokenSequences
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.params import MAX_BAD_WORD_TOKENS
from deepinfer.sampling.slot_lines import SlotLines
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.stages import EXCLUDED, Stage

WIDTH = MAX_BAD_WORD_TOKENS - 1  # tokens before the last one of the longest sequence
ANY, NONE = -1, -2  # in a beginning: every token fits; in an answer: there is no token yet


class Words(NamedTuple):
    """The sequences of one slot, on the device: beginnings [n, WIDTH] int32 flush right, last tokens [n] int64."""

    beginnings: Tensor
    last: Tensor


class Banned(NamedTuple):
    """The sequences of all rows that have some: each one's row [n] int64, the tokens before it [n, WIDTH], itself."""

    rows: Tensor
    newest: Tensor
    words: Words


class BadWords(Stage):
    """Exclude the last token of each sequence whose other tokens end the answer so far.

    Only the answer counts, not the prompt. The newest tokens of each such answer are kept here, on
    the device.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._newest = SlotLines(num_slots, WIDTH, torch.int32, device)
        self._words: dict[int, Words] = {}  # by slot

    def set_slot(self, setup: SlotSetup) -> None:
        """Take the request's sequences, if it has any, and the end of its answer so far."""
        self._words.pop(setup.slot, None)
        if not setup.bad_word_ids:
            self._newest.release(setup.slot)
            return
        line = self._newest.take(setup.slot).fill_(NONE)
        answer = setup.token_ids[setup.num_prompt :][-WIDTH:]
        line[WIDTH - len(answer) :] = to_device(answer, line.device)
        self._words[setup.slot] = _as_tensors(setup.bad_word_ids, line.device)

    def remembers(self, slots: NDArray[np.int32]) -> bool:
        return self._newest.holders(slots).size > 0

    def observe(self, slots: NDArray[np.int32], token_ids: Tensor) -> None:
        """Each of these slots that has bad words gets its token as the newest one."""
        users = self._newest.holders(slots)
        if users.size == 0:
            return
        tokens = token_ids[to_device(users, token_ids.device)].int()
        lines = self._newest.numbers(slots[users])
        self._newest.tensor[lines] = torch.cat([self._newest.tensor[lines, 1:], tokens[:, None]], dim=1)

    def prepare(self, params: RowParams, device: torch.device) -> Banned | None:
        """The sequences of this step's rows, one below the other."""
        rows = self._newest.holders(params.slots)
        if rows.size == 0:
            return None
        slots = params.slots[rows]
        words = [self._words[slot] for slot in slots.tolist()]
        counts = to_device(np.array([len(one.last) for one in words]), device)
        stacked = Words(torch.cat([one.beginnings for one in words]), torch.cat([one.last for one in words]))
        places, newest = to_device(rows, device), self._newest.tensor[self._newest.numbers(slots)]
        if params.before is not None:
            drafts, is_there = params.before.part(rows, device)
            last = torch.arange(WIDTH, device=device) + is_there.sum(1, keepdim=True)
            newest = torch.cat([newest, drafts.int()], dim=1).gather(1, last)
        return Banned(places.repeat_interleave(counts), newest.repeat_interleave(counts, 0), stacked)

    def apply(self, logits: Tensor, prepared: Banned) -> Tensor:
        """Logits [rows, vocab] without the tokens that would complete a sequence."""
        rows, newest, words = prepared
        is_complete = ((words.beginnings == ANY) | (words.beginnings == newest)).all(-1)
        # Added, not put: one token may be the last of several sequences.
        change = logits.new_zeros(len(rows)).masked_fill(is_complete, EXCLUDED)
        return logits.index_put((rows, words.last), change, accumulate=True)


def _as_tensors(sequences: TokenSequences, device: torch.device) -> Words:
    beginnings = np.full((len(sequences), WIDTH), ANY, dtype=np.int32)
    for line, sequence in zip(beginnings, sequences, strict=True):
        line[WIDTH - len(sequence) + 1 :] = sequence[:-1]
    last = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)
    return Words(to_device(beginnings, device), to_device(last, device))
