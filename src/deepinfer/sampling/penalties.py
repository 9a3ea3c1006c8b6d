"""Penalties for tokens that were there before: repetition, presence and frequency."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_lines import SlotLines
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.stages import Stage, with_rows


class Penalized(NamedTuple):
    """The rows with a penalty, their lines, and what each asked for: [used, 1] float32, None if no row did.

    drafts: tokens [used, most] before each row that are not counted yet, and which of them are there; or None.
    """

    rows: Tensor
    count_lines: Tensor
    prompt_lines: Tensor
    drafts: tuple[Tensor, Tensor] | None
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None


class Penalties(Stage):
    """Lower (or raise) the logits of tokens seen before.

    The repetition penalty (Keskar et al., "CTRL", 2019, section 4.1; here for both signs of a logit)
    is for tokens of prompt and answer; then frequency times the token's count, and presence if the
    count is not 0, are taken off, both for the answer alone. The counts live on the device and
    grow with each drawn token, so a step can be planned before its tokens are known to the host;
    a request that starts again in a slot is counted from the tokens in its setup.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._counts = SlotLines(num_slots, vocab_size, torch.int32, device)  # of each token in the answer
        self._is_prompt = SlotLines(num_slots, vocab_size, torch.bool, device)

    def set_slot(self, setup: SlotSetup) -> None:
        """Count the tokens that are known already, if the request has a penalty."""
        slot, params = setup.slot, setup.params
        if params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0:
            self._counts.release(slot)
            self._is_prompt.release(slot)
            return
        counts, is_prompt = self._counts.take(slot), self._is_prompt.take(slot)
        known = to_device(setup.token_ids.astype(np.int64), counts.device)
        is_prompt[known[: setup.num_prompt]] = True
        answer = known[setup.num_prompt :]
        counts.scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def remembers(self, slots: NDArray[np.int32]) -> bool:
        return self._counts.holders(slots).size > 0

    def observe(self, slots: NDArray[np.int32], token_ids: Tensor) -> None:
        """Count one more token for each of these slots that has a penalty."""
        users = self._counts.holders(slots)
        if users.size == 0:
            return
        tokens = token_ids[to_device(users, token_ids.device)]
        self._counts.tensor[self._counts.numbers(slots[users]), tokens] += 1  # the lines differ, so no place is twice

    def prepare(self, params: RowParams, device: torch.device) -> Penalized | None:
        """The rows with a penalty."""
        rows = self._counts.holders(params.slots)
        if rows.size == 0:
            return None
        values = []
        for name, unused in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            wanted = params[name][rows]
            values.append(to_device(wanted, device)[:, None] if (wanted != unused).any() else None)
        slots, places = params.slots[rows], to_device(rows, device)
        drafts = None if params.before is None else params.before.part(rows, device)
        return Penalized(places, self._counts.numbers(slots), self._is_prompt.numbers(slots), drafts, *values)

    def apply(self, logits: Tensor, prepared: Penalized) -> Tensor:
        """Logits [rows, vocab] with the penalties taken off."""
        rows, count_lines, prompt_lines, drafts, repetition, presence, frequency = prepared
        chosen, counts = logits[rows], self._counts.tensor[count_lines]
        if drafts is not None:
            tokens, is_there = drafts
            counts.scatter_add_(1, tokens, is_there.int())
        is_in_answer = counts > 0
        if repetition is not None:
            is_new = ~self._is_prompt.tensor[prompt_lines].logical_or_(is_in_answer)
            chosen.mul_(torch.where(chosen > 0, 1 / repetition, repetition).masked_fill_(is_new, 1.0))
        if frequency is not None:
            chosen.sub_(frequency * counts)
        if presence is not None:
            chosen.sub_(presence * is_in_answer)
        return with_rows(logits, rows, chosen)
