"""Engram: the gated update of the streams from a table of rows, which stays as it is stored."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_FP8, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, LONG, POINTER, dense, numbers
from deepinfer.errors import ShapeError
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import EngramWeights


class EngramStruct(ctypes.Structure):
    """`struct Engram` of native/engram.cpp."""

    _fields_ = (
        ("wkv", MatrixStruct),
        ("values", POINTER),
        ("scales", POINTER),
        ("weight", POINTER),
        ("table_rows", LONG),
        ("head_dim", LONG),
        ("num_streams", LONG),
        ("eps", FLOAT),
    )


@dataclass(frozen=True)
class CpuEngram:
    """Engram of one layer; weight [m, H] float32 is the product of both norm weights."""

    wkv: Matrix
    values: Tensor
    scales: Tensor
    weight: Tensor
    struct: EngramStruct
    address: int


def prepare_engram(engram: EngramWeights) -> CpuEngram:
    """Pack wkv and the norm weights."""
    wkv = prepare_matrix(engram.wkv, rounding=TO_FP8)
    require(engram.table.scale is not None, "an engram table has scales")
    assert engram.table.scale is not None
    values, scales = engram.table.value.contiguous(), engram.table.scale.contiguous()
    table_rows, head_dim = values.shape
    expect("engram table", values, (None, None), torch.float8_e4m3fn)
    expect("engram scales", scales, (table_rows, head_dim // 32))
    weight = numbers(engram.q_weight.value.float() * engram.k_weight.value.float())
    num_streams, hidden = weight.shape
    require(
        wkv.rows == (num_streams + 1) * hidden,
        f"engram wkv has {wkv.rows} rows; it must have {num_streams + 1} x {hidden}",
    )
    require(wkv.columns % head_dim == 0, f"engram wkv has {wkv.columns} columns; they must be rows of {head_dim}")
    struct = EngramStruct(
        wkv.structs[0], values.data_ptr(), scales.data_ptr(), weight.data_ptr(),
        table_rows, head_dim, num_streams, engram.norm_eps,
    )  # fmt: skip
    return CpuEngram(wkv, values, scales, weight, struct, ctypes.addressof(struct))


def engram(streams: Tensor, rows: Tensor, is_image: Tensor | None, engram: CpuEngram) -> Tensor:
    """streams + gate * value: streams [T, m, H] float32, rows [T, columns] int64 -> [T, m, H] float32."""
    num_tokens, columns = rows.shape
    streams = dense("streams", streams, (num_tokens, *engram.weight.shape))
    rows = dense("engram rows", rows, (num_tokens, engram.wkv.columns // engram.values.shape[1]), torch.int64)
    image = None
    if is_image is not None:
        is_image = dense("is_image", is_image, (num_tokens,), torch.bool)
        image = is_image.data_ptr()
    out = torch.empty_like(streams)
    if native().engram(engram.address, streams.data_ptr(), rows.data_ptr(), columns, image, num_tokens, out.data_ptr()):
        raise ShapeError(f"engram rows reach from {rows.min()} to {rows.max()}; the table has {len(engram.values)}")
    return out
