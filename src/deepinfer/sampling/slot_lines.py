"""Device memory for the slots that need it: one line of a tensor each, none before the first asks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.transfer import to_device

NO_SLOTS = np.zeros(0, dtype=np.int64)


class SlotLines:
    """Lines [width] of one tensor; a slot holds one from `take` to `release`.

    The tensor doubles when all its lines are held, up to one line per slot, and never shrinks.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(0, width, dtype=dtype, device=device)
        self._lines = np.full(num_slots, -1, dtype=np.int64)  # of each slot; -1 = it holds none
        self._free: list[int] = []
        self._num_held = 0

    def take(self, slot: int) -> Tensor:
        """The slot's line [width], zeroed, to be written in place."""
        if self._lines[slot] < 0:
            if not self._free:
                self._grow()
            self._lines[slot] = self._free.pop()
            self._num_held += 1
        return self.tensor[int(self._lines[slot])].zero_()

    def release(self, slot: int) -> None:
        """The slot needs its line no more, if it has one."""
        if self._lines[slot] >= 0:
            self._free.append(int(self._lines[slot]))
            self._lines[slot] = -1
            self._num_held -= 1

    def holders(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Which of these slots hold a line: ascending indices into `slots`."""
        if self._num_held == 0:
            return NO_SLOTS
        return np.flatnonzero(self._lines[slots] >= 0)

    def numbers(self, slots: NDArray[np.int32]) -> Tensor:
        """Line numbers [n] int64 of slots that all hold one, on the device."""
        return to_device(self._lines[slots], self.tensor.device)

    def _grow(self) -> None:
        old = len(self.tensor)
        new = min(max(1, 2 * old), len(self._lines))
        self.tensor = torch.cat([self.tensor, self.tensor.new_zeros(new - old, self.tensor.shape[1])])
        self._free = list(range(new - 1, old - 1, -1))
