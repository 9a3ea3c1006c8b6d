"""The numeric sampling parameters of every slot, kept as columns so that a step gathers them at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.messages import SlotSetup
from deepinfer.sampling.before import Before

# A numeric field of SamplingParams that a stage reads gets one line here; None becomes -1.
COLUMNS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "min_tokens": np.int64,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "logprobs": np.int64,
    "prompt_logprobs": np.int64,
}
DERIVED: dict[str, type[np.generic]] = {"num_prompt": np.int64, "wants_processed": np.bool_}
# Below this a temperature acts as 0: scaled logits would leave float32, and no draw differs from the argmax.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class RowParams:
    """The rows of one step: each column is [rows], line i belongs to row i; gathered when it is asked for.

    slots: [rows] int32. positions: [rows] int32, of the tokens to be drawn. before: the drafts between the
    tokens that were observed and each row's; None = no row has any.
    """

    slot_columns: dict[str, NDArray[Any]]
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    vocab_size: int
    before: Before | None = None

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.slot_columns[name][self.slots]

    @cached_property
    def is_random(self) -> NDArray[np.bool_]:
        """[rows] whether the row draws at random; the others take the likeliest token."""
        result: NDArray[np.bool_] = self["temperature"] > 0
        return result

    @property
    def num_generated(self) -> NDArray[np.int64]:
        """[rows] tokens of the answer before the one to be drawn."""
        result: NDArray[np.int64] = self.positions - self["num_prompt"]
        return result


class SlotParams:
    """One line of parameters per slot; a line is replaced when the slot gets a new occupant."""

    def __init__(self, num_slots: int) -> None:
        kinds = COLUMNS | DERIVED
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(num_slots, dtype) for name, dtype in kinds.items()}

    def set(self, setup: SlotSetup) -> None:
        """Take the parameters of the slot's new occupant; its seed is not None."""
        slot, params = setup.slot, setup.params
        assert params.seed is not None, "the frontend fills in the seed"
        for name in COLUMNS:
            value = getattr(params, name)
            self._columns[name][slot] = -1 if value is None else value
        if params.temperature < MIN_TEMPERATURE:
            self._columns["temperature"][slot] = 0.0
        self._columns["num_prompt"][slot] = setup.num_prompt
        self._columns["wants_processed"][slot] = params.logprobs_mode == "processed"

    def column(self, name: str) -> NDArray[Any]:
        """One parameter of all slots."""
        return self._columns[name]

    def rows(
        self, slots: NDArray[np.int32], positions: NDArray[np.int32], vocab_size: int, before: Before | None = None
    ) -> RowParams:
        """The parameters of these slots [rows], in this order; valid until a slot is set."""
        return RowParams(self._columns, slots, positions, vocab_size, before)
