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
GROUPS = {FLOAT32: 1, BFLOAT16: 2, E4M3: 4}  # columns that lie together
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

    memory: what the structs point into, packed panels and exponents. structs: an array of MatrixStruct, one per
    matrix. address: of the first struct; native functions take it as `const Matrix*`.
    """

    memory: tuple[Tensor, ...]
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
    parts = [_stacked(weight) for weight in weights]
    stack, columns = len(parts[0].value), parts[0].value.shape[2] * (2 if number_format == E2M1 else 1)
    rows = sum(part.value.shape[1] for part in parts)
    rounds = rounds and ROUNDS_INPUTS and number_format in (E4M3, E2M1)
    require(
        not rounds or columns % BLOCK == 0, f"a product that rounds its input has {columns} columns, no whole blocks"
    )
    array, memory = (MatrixStruct * stack)(), []
    for number, struct in enumerate(array):  # one by one, so that a whole stack is never there three times
        each = [Weight(part.value[number], None if part.scale is None else part.scale[number]) for part in parts]
        values = torch.cat([_codes(one, number_format) for one in each])
        padding = -columns % BLOCK // (2 if number_format == E2M1 else 1)
        memory.append(weights_arena().place(_packed(_panels(F.pad(values, (0, padding))), number_format)))
        struct.values = memory[-1].data_ptr()
        if number_format in (E4M3, E2M1):
            scales = torch.cat([_exponents(one, columns) for one in each])
            memory.append(weights_arena().place(_panels(scales).transpose(1, 2)))
            struct.exponents = memory[-1].data_ptr()
        struct.rows, struct.columns, struct.format = rows, columns, number_format
        struct.rounds = rounds
    return Matrix(tuple(memory), array, ctypes.addressof(array), rows, columns)


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
    """[rows, columns]: numbers or bytes; E2M1 [rows, columns / 2] bytes, the even column in the low nibble."""
    if number_format in (E4M3, E2M1):
        return weight.value.view(torch.uint8)
    return weight.value.to(torch.bfloat16 if number_format == BFLOAT16 else torch.float32)


def _exponents(weight: Weight, columns: int) -> Tensor:
    """[rows, blocks] uint8."""
    assert weight.scale is not None
    rows, blocks = weight.value.shape[0], -(-columns // BLOCK)
    scale = _row_scales(weight.scale.view(torch.uint8), rows)
    require(scale.shape == (rows, blocks), f"scales {list(weight.scale.shape)} do not fit {rows} x {columns}")
    return scale


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales [..., rows, blocks] out of ones per row or per tile of 32 rows."""
    return scale if scale.shape[-2] == rows else scale.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _stacked(weight: Weight) -> Weight:
    """The weight with a stack dimension."""
    if weight.value.ndim == 3:
        return weight
    return Weight(weight.value.unsqueeze(0), None if weight.scale is None else weight.scale.unsqueeze(0))


def _panels(values: Tensor) -> Tensor:
    """[rows, n] -> [panels, 16, n], rows padded with zeros."""
    panels: Tensor = F.pad(values, (0, 0, 0, -values.shape[0] % PANEL)).unflatten(0, (-1, PANEL))
    return panels


def _packed(panels: Tensor, number_format: int) -> Tensor:
    """[panels, 16, columns] -> the same matrix in the order of native/gemm.h."""
    if number_format == E2M1:
        first, second = panels.unflatten(-1, (-1, 2)).unbind(-1)  # columns 0, 1 and 2, 3 of each group
        even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
        return torch.stack([even, odd], dim=-1)[:, E2M1_ROWS].transpose(1, 2)  # [panels, groups, 16, 2]
    groups: Tensor = panels.unflatten(-1, (-1, GROUPS[number_format])).transpose(1, 2)  # [panels, groups, 16, n]
    return groups
