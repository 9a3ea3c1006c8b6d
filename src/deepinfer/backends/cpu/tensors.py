"""Tensors on their way into native code: checked and dense; the C types of struct fields."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from deepinfer.ops.reference.shapes import expect, require

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def dense(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor, contiguous; raises ShapeError unless it has this shape and dtype."""
    if tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    expect(name, tensor, shape, dtype)
    return tensor.contiguous()


def result(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The float32 memory for a result, new for None; raises ShapeError unless it has this shape and is dense."""
    if tensor is None:
        return empty(*shape)
    expect(name, tensor, shape, torch.float32)
    require(tensor.is_contiguous(), f"the memory for {name} must be contiguous")
    return tensor


def rows_of(name: str, tensor: Tensor, columns: int) -> Tensor:
    """A matrix [T, columns] float32 whose rows are dense, however far they are apart; raises ShapeError."""
    expect(name, tensor, (None, columns), torch.float32)
    return tensor if tensor.stride(1) == 1 or columns == 1 else tensor.contiguous()


def empty(*shape: int, dtype: type[np.generic] = np.float32) -> Tensor:
    """Memory for a result. Unlike `torch.empty`, this does not let go of the GIL (see `short_native`)."""
    return torch.from_numpy(np.empty(shape, dtype))


def numbers(tensor: Tensor) -> Tensor:
    """A contiguous float32 copy or the tensor itself."""
    return tensor.float().contiguous()
