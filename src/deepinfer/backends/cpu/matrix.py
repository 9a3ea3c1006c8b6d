"""Checkpoint matrices in the layouts of native/gemm.h, in panels of 16 rows.

For float32 vectors they stay packed as they are stored; for bf16 tiles e4m3 becomes bf16, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.memory import weights_arena
from deepinfer.backends.cpu.tensors import LONG, POINTER, rows_of
from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

PANEL, BLOCK, TILE = 16, 32, 32
ROUNDS_INPUTS = True  # tests turn it off to compare whole models sharply
FLOAT32, BFLOAT16, E4M3, E2M1, TILED_BFLOAT16, TILED_E2M1, TILED_E4M3 = range(7)  # `enum Format`
COLUMN_BITS = (32, 16, 8, 4, 16, 4, 8)
UNROUNDED, TO_FP8, TO_BF16 = range(3)  # `enum Rounding`
INPUT_PARTS = 3  # bf16 numbers that a float32 number is the sum of
SCALED = (E4M3, E2M1, TILED_E2M1, TILED_E4M3)  # formats that keep their scales


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


class PartStruct(ctypes.Structure):
    """`struct Part` of native/pack.cpp."""

    _fields_ = (("values", POINTER), ("scales", POINTER), ("rows", LONG), ("scale_rows", LONG))


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


def prepare_matrix(*weights: Weight, rounding: int = UNROUNDED) -> Matrix:
    """One matrix, or several stacked by rows that share their input; each may have a leading stack dimension.

    rounding: of the input of a product. TO_FP8: in blocks of 32, if the weights are fp8 or fp4. TO_BF16: where tiles
    form products of one bf16 number for each input.
    """
    stored = {_format(weight) for weight in weights}
    require(len(stored) == 1, "matrices that share their input must all be stored in the same format")
    number_format = stored.pop()
    parts = [_stacked(weight, number_format) for weight in weights]
    stack, columns = len(parts[0].value), parts[0].value.shape[2] * (2 if number_format == E2M1 else 1)
    rows = sum(part.value.shape[1] for part in parts)
    if not ROUNDS_INPUTS or (rounding == TO_FP8 and number_format not in (E4M3, E2M1)):
        rounding = UNROUNDED
    require(
        rounding != TO_FP8 or columns % BLOCK == 0,
        f"a product that rounds its input has {columns} columns, no whole blocks",
    )
    panels, blocks, layout = -(-rows // PANEL), -(-columns // BLOCK), _layout(parts, number_format, rounding)
    if rounding == TO_BF16 and layout < TILED_BFLOAT16:
        rounding = UNROUNDED
    value_bytes = panels * PANEL * blocks * BLOCK * COLUMN_BITS[layout] // 8
    scale_bytes = panels * PANEL * blocks if layout in SCALED else 0
    array, memory = (MatrixStruct * stack)(), []
    for number, struct in enumerate(array):
        place = weights_arena().take(value_bytes + scale_bytes)
        memory.append(place)
        struct.values, struct.exponents = place.data_ptr(), place.data_ptr() + value_bytes if scale_bytes else None
        struct.rows, struct.columns, struct.format, struct.rounds = rows, columns, layout, rounding
        members = [part.value[number].contiguous() for part in parts]  # one by one: a stack may take no memory yet
        each = [_part(value, part.scale, number, columns) for value, part in zip(members, parts, strict=True)]
        native().pack((PartStruct * len(each))(*each), len(each), number_format, ctypes.byref(struct))
    return Matrix(tuple(memory), array, ctypes.addressof(array), rows, columns)


def prepare_groups(weight: Weight, num_groups: int) -> Matrix:
    """A stack of `num_groups` matrices out of one whose rows they share in order; inputs are rounded to bf16 alone."""
    rows = weight.value.shape[0]
    require(rows % num_groups == 0, f"a matrix of {rows} rows has no {num_groups} equal groups")
    value, scale = weight.value.unflatten(0, (num_groups, -1)), None
    if weight.scale is not None:
        scale = _row_scales(weight.scale.view(torch.uint8), rows).unflatten(0, (num_groups, -1))
    return prepare_matrix(Weight(value, scale), rounding=TO_BF16)


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


def _layout(parts: Sequence[Weight], number_format: int, rounding: int) -> int:
    """The format that weights stored like this are packed in; rounded inputs are one bf16 number each, others three."""
    if number_format == FLOAT32 or native().tile_parts() < (1 if rounding else INPUT_PARTS):
        return number_format
    if number_format == BFLOAT16:
        return TILED_BFLOAT16
    scales = [part.scale for part in parts if part.scale is not None]
    if not all(native().stays_packed(number_format, one.data_ptr(), one.numel()) for one in scales):
        return TILED_BFLOAT16
    if number_format == E2M1:
        return TILED_E2M1
    has_nan = any(bool((part.value.view(torch.uint8) & 127 == 127).any()) for part in parts)
    return TILED_BFLOAT16 if has_nan else TILED_E4M3


def _part(value: Tensor, scales: Tensor | None, number: int, columns: int) -> PartStruct:
    """Matrix `number` of a stack, whose dense numbers are `value`."""
    rows, blocks = len(value), -(-columns // BLOCK)
    if scales is None:
        return PartStruct(value.data_ptr(), None, rows, 1)
    scale = scales[number]
    tile = 1 if len(scale) == rows else TILE
    require(scale.shape == (-(-rows // tile), blocks), f"scales {list(scale.shape)} do not fit {rows} x {columns}")
    return PartStruct(value.data_ptr(), scale.data_ptr(), rows, tile)


def _row_scales(scale: Tensor, rows: int) -> Tensor:
    """Scales [..., rows, blocks] out of ones per row or per tile of 32 rows."""
    return scale if scale.shape[-2] == rows else scale.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _stacked(weight: Weight, number_format: int) -> Weight:
    """The weight with a stack dimension and dense scales."""
    value, scale = weight.value, weight.scale
    if scale is None:
        value = value.to(torch.bfloat16 if number_format == BFLOAT16 else torch.float32)
    if value.ndim == 2:
        value, scale = value.unsqueeze(0), None if scale is None else scale.unsqueeze(0)
    return Weight(value, None if scale is None else scale.view(torch.uint8).contiguous())
