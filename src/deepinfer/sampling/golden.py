"""`golden_token_ids`: the answer is given, and the model only says how likely it is (teacher forcing)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_params import RowParams


class Golden:
    """Puts given tokens in the place of drawn ones; no stage, since logits stay as they are."""

    def __init__(self) -> None:
        self._tokens: dict[int, NDArray[np.int64]] = {}  # by slot

    def set_slot(self, setup: SlotSetup) -> None:
        """Take the request's tokens, if it has any."""
        self._tokens.pop(setup.slot, None)
        if setup.params.golden_token_ids is not None:
            self._tokens[setup.slot] = np.array(setup.params.golden_token_ids, dtype=np.int64)

    @property
    def has_any(self) -> bool:
        """Whether any slot has such an answer."""
        return bool(self._tokens)

    def force(self, token_ids: Tensor, params: RowParams) -> Tensor:
        """Tokens [rows] int64: the given one where the row's answer has one at its place."""
        if not self._tokens:
            return token_ids
        rows, forced, places = [], [], params.num_generated
        for row in np.flatnonzero(np.isin(params.slots, list(self._tokens))).tolist():
            tokens, place = self._tokens[int(params.slots[row])], int(places[row])
            if place < len(tokens):
                rows.append(row)
                forced.append(int(tokens[place]))
        if not rows:
            return token_ids
        return token_ids.index_copy(0, *(to_device(np.array(part), token_ids.device) for part in (rows, forced)))
