"""What a checkpoint holds, tensor by tensor, and who gives it: no torch needed to describe it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Dtype = Literal["BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"]  # safetensors names; I8 = two e2m1 codes
ITEM_BYTES: dict[str, int] = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
CODE_RMS = {"F8_E4M3": 112.0, "I8": 2.926}  # root mean square of random codes before scaling


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a checkpoint must hold.

    part: what it belongs to, as in "attention"; layer: index in this engine, None outside layers.
    mean, std: of healthy random values, for `load_format=dummy`; of a scaled tensor after scaling,
        of its scales their root mean square.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    part: str
    layer: int | None
    std: float
    mean: float = 0.0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Numbers of the model in it; scales are part of the format and count as none."""
        return {"F8_E8M0": 0, "I8": 2}.get(self.dtype, 1) * self.num_elements


class Source(Protocol):
    """Gives tensors by name (without the optional `model.` prefix), on the host."""

    def get(self, name: str) -> Tensor:
        """One tensor; the caller must not write to it. Raises CheckpointError when it is not there."""
        ...

    def stack(self, names: Sequence[str]) -> Tensor:
        """Tensors of equal shape and dtype as [len(names), ...]; the caller must not write to it."""
        ...
