"""`min_tokens`: no token that ends the answer before it has this many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.stages import EXCLUDED, Stage


class Places(NamedTuple):
    """Places in the logits: row and token of each, [n] int64."""

    rows: Tensor
    token_ids: Tensor


class MinTokens(Stage):
    """Exclude end-of-sequence (ignored or not) and stop tokens while the answer is too short."""

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self._eos_ids = tuple(eos_ids)
        self._end_ids: dict[int, NDArray[np.int64]] = {}  # by slot

    def set_slot(self, setup: SlotSetup) -> None:
        """Note the tokens that would end the request's answer."""
        self._end_ids.pop(setup.slot, None)
        if setup.params.min_tokens > 0:
            ids = {*self._eos_ids, *setup.params.stop_token_ids}
            self._end_ids[setup.slot] = np.array(sorted(ids), dtype=np.int64)

    def prepare(self, params: RowParams, device: torch.device) -> Places | None:
        """The ends that are too early."""
        if not self._end_ids:
            return None
        rows = np.flatnonzero(params.num_generated < params["min_tokens"])
        if rows.size == 0:
            return None
        ids = [self._end_ids[slot] for slot in params.slots[rows].tolist()]
        places = np.repeat(rows, [len(one) for one in ids]), np.concatenate(ids)
        return Places(*(to_device(part, device) for part in places))

    def apply(self, logits: Tensor, prepared: Places) -> Tensor:
        """Logits [rows, vocab] without those ends."""
        return logits.index_put(tuple(prepared), logits.new_tensor(EXCLUDED))
