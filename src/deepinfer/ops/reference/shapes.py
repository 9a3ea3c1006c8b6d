"""The check at an op's door: a few comparisons, and an error that names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.errors import ShapeError


def expect(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ShapeError unless the tensor has this shape (None = any size) and, if given, this dtype."""
    actual = tensor.shape
    fits = len(actual) == len(shape)
    for size, rule in zip(actual, shape, strict=False):
        fits = fits and (rule is None or size == rule)
    if fits and (dtype is None or tensor.dtype is dtype):
        return
    if fits:
        raise ShapeError(f"{name} is {tensor.dtype}; it must be {dtype}")
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ShapeError(f"{name} has shape {list(actual)}; it must be [{wanted}]")


def require(holds: bool, message: str) -> None:
    """Raise ShapeError with this message unless the rule holds."""
    if not holds:
        raise ShapeError(message)
