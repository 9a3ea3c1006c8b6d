"""Before: the drafts that come before a line and that no stage has observed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Before:
    """tokens: [lines, most] int32 on the host; of line i the first counts[i] count. counts: [lines]."""

    tokens: NDArray[np.int32]
    counts: NDArray[np.int32]

    def part(self, lines: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Of some lines [n]: tokens [n, most] int64, and which of them count [n, most] bool."""
        is_there = np.arange(self.tokens.shape[1]) < self.counts[lines, None]
        tokens = np.where(is_there, self.tokens[lines], 0).astype(np.int64)
        return torch.from_numpy(tokens).to(device), torch.from_numpy(is_there).to(device)
