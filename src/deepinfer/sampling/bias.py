"""Fixed changes to the logits of a request: `logit_bias` and `allowed_token_ids` in one line of biases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_lines import SlotLines
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.stages import EXCLUDED, Stage, with_rows


class Biased(NamedTuple):
    """The rows with biases and their lines, both [used] int64."""

    rows: Tensor
    lines: Tensor


class Bias(Stage):
    """Add the request's biases; tokens that are not allowed have one of -infinity."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._biases = SlotLines(num_slots, vocab_size, torch.float32, device)

    def set_slot(self, setup: SlotSetup) -> None:
        """Spread the request's lists over a line of the vocabulary, if it has any."""
        allowed, biases = setup.params.allowed_token_ids, setup.params.logit_bias
        if allowed is None and not biases:
            self._biases.release(setup.slot)
            return
        line = self._biases.take(setup.slot)
        if allowed is not None:
            line.fill_(EXCLUDED)
            line[to_device(np.array(allowed, dtype=np.int64), line.device)] = 0.0
        if biases:
            ids = np.array([one.token_id for one in biases], dtype=np.int64)
            values = np.array([one.bias for one in biases], dtype=np.float32)
            line[to_device(ids, line.device)] += to_device(values, line.device)

    def prepare(self, params: RowParams, device: torch.device) -> Biased | None:
        """The rows with biases."""
        rows = self._biases.holders(params.slots)
        if rows.size == 0:
            return None
        return Biased(to_device(rows, device), self._biases.numbers(params.slots[rows]))

    def apply(self, logits: Tensor, prepared: Biased) -> Tensor:
        """Logits [rows, vocab] with the biases added."""
        return with_rows(logits, prepared.rows, logits[prepared.rows].add_(self._biases.tensor[prepared.lines]))
