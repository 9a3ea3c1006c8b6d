"""Values that one op hands to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Mix:
    """Hyper-connection weights of one half layer.

    pre: [T, m] collapses the streams for the *next* half. post: [T, m] spreads this half's output.
    comb: [T, m from, m to] mixes the streams. All float32.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class Selection:
    """Compressed entries that each token attends to.

    entries: [T, n] int32 ascending, n <= top_k, -1 where there are fewer.
    candidates: [T, c] int32 candidate blocks ascending, -1 where there are fewer; None before the
        candidate source.
    """

    entries: Tensor
    candidates: Tensor | None


class Attended:
    """Attended heads in the form that `project_out` of the same backend takes; others ask for `heads`."""

    def heads(self) -> Tensor:
        """The same numbers [T, h, D]."""
        raise NotImplementedError


@dataclass(frozen=True)
class DrawKeys:
    """What decides the noise of a draw besides the token id, see `Ops.draw`: temperature [n] float32, 0 = no noise;
    seeds and positions [n] int64."""

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
