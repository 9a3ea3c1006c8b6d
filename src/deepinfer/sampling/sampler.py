"""From logits to tokens: the stages, one draw, and the model's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.table import Ops
from deepinfer.sampling.logprobs import TokenLogprobs, model_logprobs
from deepinfer.sampling.masks import exclude_masked
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slot_params import RowParams, SlotParams
from deepinfer.sampling.stages import STAGES, Stage
from deepinfer.structured.rows import RowMasks


class Sampled(NamedTuple):
    """One line per row, on the device of the logits."""

    token_ids: Tensor  # [rows] int64
    is_finite: Tensor  # [rows] bool; False: the logits held NaN or infinity, or no finite value; the token is 0
    logprobs: TokenLogprobs | None  # None when no row asks


class Sampler:
    """Chooses the next token of each row by the parameters of the row's slot.

    What a row gets depends on its logits, parameters, seed and position only, never on its place
    or on the other rows.
    """

    def __init__(self, ops: Ops, num_slots: int, stages: Sequence[Stage] = STAGES) -> None:
        self._ops = ops
        self._stages = tuple(stages)
        self._slots = SlotParams(num_slots)

    def set_slot(self, slot: int, params: SamplingParams) -> None:
        """The slot has a new occupant (`messages.SlotSetup`); `params.seed` is not None."""
        self._slots.set(slot, params)

    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        masks: RowMasks | None = None,
    ) -> Sampled:
        """Choose one token per row.

        logits: [rows, vocab] float32, not changed. slots: [rows], on the host. positions: [rows]
        of the tokens to be drawn, on the host: with the seed they key the noise of the draw.
        masks: what the rows under a grammar may take; None = there are none.
        """
        params = self._slots.rows(slots, logits.shape[1])
        allowed = logits if masks is None else exclude_masked(logits, masks)
        best, token_ids = allowed.max(-1)  # the first of equal values
        is_finite = best.isfinite()
        if masks is not None:
            is_finite &= logits.amax(-1).isfinite()
        if params.is_random.any():
            token_ids = self._draw(allowed, params, positions)
        token_ids = token_ids.where(is_finite, 0)
        return Sampled(token_ids, is_finite, model_logprobs(logits, token_ids, is_finite, params))

    def _draw(self, logits: Tensor, params: RowParams, positions: NDArray[np.int32]) -> Tensor:
        for stage in self._stages:
            prepared = stage.prepare(params, logits.device)
            if prepared is not None:
                logits = stage.apply(logits, prepared)
        keys = params["temperature"], params["seed"], positions.astype(np.int64)
        return self._ops.draw(logits, *(torch.from_numpy(key).to(logits.device) for key in keys))
