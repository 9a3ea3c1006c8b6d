"""Checkpoint matrices in the layout of native/gemm.h: packed as they are stored, in panels of 16 rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cpu import library
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import Weight

PANEL, BLOCK, TILE = 16, 32, 32
FLOAT32, BFLOAT16, E4M3, E2M1 = range(4)
EXPONENT_SHIFT = {E4M3: 8, E2M1: -1}  # the decoders give 1/256 of an e4m3 number and twice an e2m1 number


class MatrixStruct(ctypes.Structure):
    """`struct Matrix` of native/gemm.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Matrix:
    """One matrix [rows, columns], or a stack of equal ones.

    values: packed panels with the matrix as first dimension. exponents: bytes per matrix, panel, block of 32
    columns and row, or None. structs: an array of MatrixStruct, one per matrix, which points into both.
    """

    values: Tensor
    exponents: Tensor | None
    structs: ctypes.Array[MatrixStruct]
    rows: int
    columns: int

    @property
    def address(self) -> int:
        """Of the first struct; native functions take it as `const Matrix*`."""
        return ctypes.addressof(self.structs)


def prepare_matrix(*weights: Weight) -> Matrix:
    """One matrix, or several stacked by rows that share their input; each may have a leading stack dimension."""
    formats = {_format(weight) for weight in weights}
    require(len(formats) == 1, "matrices that share their input must all be stored in the same format")
    number_format = formats.pop()
    values = torch.cat(
        [_values(weight, number_format) for weight in weights], dim=-2
    )  # [stack, rows, bytes or numbers]
    stack, rows, width = values.shape
    columns = width * 2 if number_format == E2M1 else width
    exponents = None
    if number_format in EXPONENT_SHIFT:
        exponents = torch.cat([_exponents(weight, number_format, columns) for weight in weights], dim=-2)
        exponents = _panels(exponents)
        step = 2 if number_format == E2M1 else 1
        values = F.pad(values, (0, (-columns % BLOCK) // step))
    packed = _panels(values)
    array = (MatrixStruct * stack)()
    for number, struct in enumerate(array):
        struct.values = packed[number].data_ptr()
        struct.exponents = exponents[number].data_ptr() if exponents is not None else None
        struct.rows, struct.columns, struct.format = rows, columns, number_format
    return Matrix(packed, exponents, array, rows, columns)


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x [T, columns] float32 @ matrix.T -> [T, rows] float32."""
    expect("x", x, (None, matrix.columns), torch.float32)
    x = rows_of(x)
    out = torch.empty(x.shape[0], matrix.rows)
    library.function("multiply")(x.data_ptr(), x.shape[0], x.stride(0), matrix.address, out.data_ptr())
    return out


def rows_of(x: Tensor) -> Tensor:
    """x [T, n], copied unless the numbers of each row lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _format(weight: Weight) -> int:
    if weight.scale is not None:
        return E2M1 if weight.value.dtype in (torch.int8, torch.uint8) else E4M3
    return BFLOAT16 if weight.value.dtype is torch.bfloat16 else FLOAT32


def _values(weight: Weight, number_format: int) -> Tensor:
    value = weight.value.view(torch.uint8) if weight.is_quantized else weight.value
    value = value.float() if number_format == FLOAT32 else value
    if number_format == E2M1:  # both columns of a byte stay together
        value = value.view(torch.uint8)
    return value if value.ndim == 3 else value.unsqueeze(0)


def _exponents(weight: Weight, number_format: int, columns: int) -> Tensor:
    """[stack, rows, blocks] uint8 in the units of the decoder: 0 stands for 0, too large ones for infinity."""
    assert weight.scale is not None
    scale = weight.scale.view(torch.uint8)
    scale = scale if scale.ndim == 3 else scale.unsqueeze(0)
    rows = weight.value.shape[-2]
    if scale.shape[-2] != rows:
        scale = scale.repeat_interleave(TILE, dim=-2)[:, :rows]
    expected = (rows, -(-columns // BLOCK))
    require(
        tuple(scale.shape[-2:]) == expected, f"scales {list(weight.scale.shape)} do not fit {expected[0]} x {columns}"
    )
    return (scale.short() + EXPONENT_SHIFT[number_format]).clamp_(0, 255).to(torch.uint8)


def _panels(values: Tensor) -> Tensor:
    """[stack, rows, n] -> [stack, panels, n, 16], rows padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -values.shape[1] % PANEL))
    panels: Tensor = padded.unflatten(1, (-1, PANEL))
    return panels.transpose(2, 3).contiguous()
