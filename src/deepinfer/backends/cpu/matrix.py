"""Checkpoint matrices in the layout of native/gemm.h: packed as they are stored, in panels of 16 rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.tensors import rows_of
from deepinfer.ops.reference.shapes import require
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
    address: of the first struct; native functions take it as `const Matrix*`.
    """

    values: Tensor
    exponents: Tensor | None
    structs: ctypes.Array[MatrixStruct]
    address: int
    rows: int
    columns: int


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
    return Matrix(packed, exponents, array, ctypes.addressof(array), rows, columns)


def prepare_groups(weight: Weight, num_groups: int) -> Matrix:
    """A stack of `num_groups` matrices out of one whose rows they share in order."""
    rows = weight.value.shape[0]
    require(rows % num_groups == 0, f"a matrix of {rows} rows has no {num_groups} equal groups")
    value, scale = weight.value.unflatten(0, (num_groups, -1)), None
    if weight.scale is not None:
        scale = _row_scales(weight.scale.view(torch.uint8), rows).unflatten(0, (num_groups, -1))
    return prepare_matrix(Weight(value, scale))


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x [T, columns] float32 @ matrix.T -> [T, rows] float32."""
    x = rows_of("x", x, matrix.columns)
    out = torch.empty(len(x), matrix.rows)
    native().multiply(x.data_ptr(), len(x), x.stride(0), matrix.address, out.data_ptr())
    return out


def _format(weight: Weight) -> int:
    value = weight.value
    if weight.scale is not None:
        return E2M1 if value.dtype in (torch.int8, torch.uint8) else E4M3
    is_exact = value.dtype is torch.bfloat16 or torch.equal(value.bfloat16().to(value.dtype), value)
    return BFLOAT16 if is_exact else FLOAT32


def _values(weight: Weight, number_format: int) -> Tensor:
    value = weight.value.view(torch.uint8) if weight.is_quantized else weight.value
    plain = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
    value = value.to(plain[number_format]) if number_format in plain else value
    return value if value.ndim == 3 else value.unsqueeze(0)


def _exponents(weight: Weight, number_format: int, columns: int) -> Tensor:
    """[stack, rows, blocks] uint8 in the units of the decoder: 0 stands for 0, too large ones for infinity."""
    assert weight.scale is not None
    scale = weight.scale.view(torch.uint8)
    scale = scale if scale.ndim == 3 else scale.unsqueeze(0)
    rows = weight.value.shape[-2]
    scale = _row_scales(scale, rows)
    expected = (rows, -(-columns // BLOCK))
    require(
        tuple(scale.shape[-2:]) == expected, f"scales {list(weight.scale.shape)} do not fit {expected[0]} x {columns}"
    )
    return (scale.short() + EXPONENT_SHIFT[number_format]).clamp_(0, 255).to(torch.uint8)


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales [..., rows, blocks] out of ones per row or per tile of 32 rows."""
    return scale if scale.shape[-2] == rows else scale.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _panels(values: Tensor) -> Tensor:
    """[stack, rows, n] -> [stack, panels, n, 16], rows padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -values.shape[1] % PANEL))
    panels: Tensor = padded.unflatten(1, (-1, PANEL))
    return panels.transpose(2, 3).contiguous()
