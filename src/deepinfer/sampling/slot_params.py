"""The numeric sampling parameters of every slot, kept as columns so that a step gathers them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.params import SamplingParams

# A numeric field of SamplingParams that a stage reads gets one line here; None becomes -1.
COLUMNS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "logprobs": np.int64,
}
# Below this a temperature acts as 0: scaled logits would leave float32, and no draw differs from the argmax.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class RowParams:
    """Parameters of the rows of one step: each column is [rows], line i belongs to row i."""

    columns: dict[str, NDArray[Any]]
    vocab_size: int

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    @property
    def is_random(self) -> NDArray[np.bool_]:
        """[rows] whether the row draws at random; the others take the likeliest token."""
        result: NDArray[np.bool_] = self.columns["temperature"] > 0
        return result


class SlotParams:
    """One line of parameters per slot; a line is replaced when the slot gets a new occupant."""

    def __init__(self, num_slots: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(num_slots, dtype) for name, dtype in COLUMNS.items()}

    def set(self, slot: int, params: SamplingParams) -> None:
        """Take the parameters of the slot's new occupant; `params.seed` is not None."""
        assert params.seed is not None, "the frontend fills in the seed"
        for name, column in self._columns.items():
            value = getattr(params, name)
            column[slot] = -1 if value is None else value
        if params.temperature < MIN_TEMPERATURE:
            self._columns["temperature"][slot] = 0.0

    def rows(self, slots: NDArray[np.int32], vocab_size: int) -> RowParams:
        """The parameters of these slots [rows], in this order."""
        return RowParams({name: column[slots] for name, column in self._columns.items()}, vocab_size)
