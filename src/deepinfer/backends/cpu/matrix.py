"""Checkpoint matrices in the layout of native/gemm.h: packed as they are stored, in panels of 16 rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.memory import weights_arena
from deepinfer.backends.cpu.tensors import rows_of
from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

PANEL, BLOCK, TILE = 16, 32, 32
ROUNDS_INPUTS = True  # tests turn it off to compare whole models sharply
FLOAT32, BFLOAT16, E4M3, E2M1 = range(4)
GROUPS = {FLOAT32: 1, BFLOAT16: 2, E4M3: 4, E2M1: 4}  # columns that lie together
E2M1_ROWS = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]


class MatrixStruct(ctypes.Structure):
    """`struct Matrix` of native/gemm.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("rounds", ctypes.c_int64),
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


def prepare_matrix(*weights: Weight, rounds: bool = False) -> Matrix:
    """One matrix, or several stacked by rows that share their input; each may have a leading stack dimension.

    rounds: if the weights are fp8 or fp4, the input of a product is rounded to fp8 in blocks of 32.
    """
    formats = {_format(weight) for weight in weights}
    require(len(formats) == 1, "matrices that share their input must all be stored in the same format")
    number_format = formats.pop()
    values = torch.cat([_stacked(_codes(weight, number_format)) for weight in weights], dim=1)  # [stack, rows, columns]
    stack, rows, columns = values.shape
    rounds = rounds and ROUNDS_INPUTS and number_format in (E4M3, E2M1)
    require(
        not rounds or columns % BLOCK == 0, f"a product that rounds its input has {columns} columns, no whole blocks"
    )
    packed = weights_arena().place(_packed(_panels(F.pad(values, (0, -columns % BLOCK))), number_format))
    exponents = None
    if number_format in (E4M3, E2M1):
        scales = torch.cat([_stacked(_exponents(weight, columns)) for weight in weights], dim=1)
        exponents = weights_arena().place(_panels(scales).transpose(2, 3))
    array = (MatrixStruct * stack)()
    for number, struct in enumerate(array):
        struct.values = packed[number].data_ptr()
        struct.exponents = exponents[number].data_ptr() if exponents is not None else None
        struct.rows, struct.columns, struct.format = rows, columns, number_format
        struct.rounds = rounds
    return Matrix(packed, exponents, array, ctypes.addressof(array), rows, columns)


def prepare_groups(weight: Weight, num_groups: int) -> Matrix:
    """A stack of `num_groups` matrices out of one whose rows they share in order; their inputs are not rounded."""
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


def _codes(weight: Weight, number_format: int) -> Tensor:
    """[(stack,) rows, columns]: numbers, or one byte per code."""
    if number_format == E4M3:
        return weight.value.view(torch.uint8)
    if number_format == E2M1:
        pairs = weight.value.view(torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    return weight.value.to(torch.bfloat16 if number_format == BFLOAT16 else torch.float32)


def _exponents(weight: Weight, columns: int) -> Tensor:
    """[(stack,) rows, blocks] uint8."""
    assert weight.scale is not None
    rows, blocks = weight.value.shape[-2], -(-columns // BLOCK)
    scale = _row_scales(weight.scale.view(torch.uint8), rows)
    require(scale.shape[-2:] == (rows, blocks), f"scales {list(weight.scale.shape)} do not fit {rows} x {columns}")
    return scale


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales [..., rows, blocks] out of ones per row or per tile of 32 rows."""
    return scale if scale.shape[-2] == rows else scale.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _stacked(values: Tensor) -> Tensor:
    return values if values.ndim == 3 else values.unsqueeze(0)


def _panels(values: Tensor) -> Tensor:
    """[stack, rows, n] -> [stack, panels, 16, n], rows padded with zeros."""
    panels: Tensor = F.pad(values, (0, 0, 0, -values.shape[1] % PANEL)).unflatten(1, (-1, PANEL))
    return panels


def _packed(panels: Tensor, number_format: int) -> Tensor:
    """[stack, panels, 16, columns] -> the same matrices in the order of native/gemm.h."""
    groups: Tensor = panels.unflatten(-1, (-1, GROUPS[number_format])).transpose(2, 3)  # [stack, panels, groups, 16, n]
    if number_format == E2M1:
        groups = groups[..., E2M1_ROWS, :]
        groups = groups[..., :2] | groups[..., 2:] << 4
    return groups
