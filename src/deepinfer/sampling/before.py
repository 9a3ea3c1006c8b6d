"""Before: the drafts that come before a line and that no stage has observed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.transfer import to_device


@dataclass(frozen=True)
class Before:
    """tokens: [lines, most] int64, on the device; of line i the first counts[i] count. counts: [lines], on the host."""

    tokens: Tensor
    counts: NDArray[np.int32]

    def part(self, lines: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Of some lines [n]: tokens [n, most] int64, and which of them count [n, most] bool."""
        is_there = to_device(np.arange(self.tokens.shape[1]) < self.counts[lines, None], device)
        return self.tokens[to_device(lines, device)].where(is_there, 0), is_there
