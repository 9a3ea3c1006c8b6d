"""Into the attention (low-rank query, rotated query, packed window rows) and out of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_FP8, Matrix, MatrixStruct, prepare_groups, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, LONG, POINTER, dense, numbers, rows_of
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import AttentionWeights

MAX_PAIRS = 256


class AttentionStruct(ctypes.Structure):
    """`struct Attention` of native/projections.cpp."""

    _fields_ = (
        ("down", MatrixStruct),
        ("wq_b", MatrixStruct),
        ("wo_a", POINTER),
        ("wo_b", MatrixStruct),
        ("q_norm", POINTER),
        ("kv_norm", POINTER),
        ("sink", POINTER),
        ("frequencies", POINTER),
        ("num_groups", LONG),
        ("num_heads", LONG),
        ("dim", LONG),
        ("num_pairs", LONG),
        ("window", LONG),
        ("q_eps", FLOAT),
        ("kv_eps", FLOAT),
    )


@dataclass(frozen=True)
class CpuAttention:
    """Attention of one layer, packed for the native library.

    down: wq_a above wkv, [q_rank + dim, H]. wo_a: one matrix per group, [out_rank, heads * dim / groups].
    q_norm [q_rank], kv_norm [dim], sink [heads], frequencies [rope dim / 2] (radians per position): float32.
    address: of `struct`, which points into the rest.
    """

    down: Matrix
    wq_b: Matrix
    wo_a: Matrix
    wo_b: Matrix
    q_norm: Tensor
    kv_norm: Tensor
    sink: Tensor
    frequencies: Tensor
    struct: AttentionStruct
    address: int
    num_heads: int
    dim: int
    window: int


def prepare_attention(attention: AttentionWeights) -> CpuAttention:
    """Pack the weights; the two products on x become one."""
    down = prepare_matrix(attention.wq_a, attention.wkv, rounding=TO_FP8)
    wq_b = prepare_matrix(attention.wq_b, rounding=TO_FP8)
    wo_a, wo_b = prepare_groups(attention.wo_a, attention.num_groups), prepare_matrix(attention.wo_b, rounding=TO_FP8)
    frequencies = rope_frequencies(attention.rope, torch.device("cpu")).contiguous()
    dim, heads = attention.wkv.value.shape[0], attention.num_heads
    require(wq_b.rows == heads * dim, f"wq_b has {wq_b.rows} rows; it must have {heads} heads of {dim}")
    require(dim % 32 == 0, f"a head has {dim} dimensions; they must be a multiple of 32")
    require(
        2 * len(frequencies) <= dim and len(frequencies) <= MAX_PAIRS,
        f"{2 * len(frequencies)} rope dimensions do not fit a head of {dim}, or are more than {2 * MAX_PAIRS}",
    )
    q_norm, kv_norm = numbers(attention.q_norm.weight.value), numbers(attention.kv_norm.weight.value)
    sink = numbers(attention.sink.value)
    expect("q_norm", q_norm, (wq_b.columns,))
    expect("kv_norm", kv_norm, (dim,))
    expect("sink", sink, (heads,))
    require(down.rows == wq_b.columns + dim, f"wq_a has {down.rows - dim} rows; wq_b has {wq_b.columns} columns")
    require(
        wo_a.columns * attention.num_groups == heads * dim and wo_b.columns == wo_a.rows * attention.num_groups,
        f"{attention.num_groups} groups of wo_a [{wo_a.rows}, {wo_a.columns}] do not fit {heads} heads of {dim} "
        f"and wo_b of {wo_b.columns} columns",
    )
    struct = AttentionStruct(
        down.structs[0], wq_b.structs[0], wo_a.address, wo_b.structs[0],
        q_norm.data_ptr(), kv_norm.data_ptr(), sink.data_ptr(), frequencies.data_ptr(),
        attention.num_groups, heads, dim, len(frequencies), attention.window,
        attention.q_norm.eps, attention.kv_norm.eps,
    )  # fmt: skip
    return CpuAttention(
        down, wq_b, wo_a, wo_b, q_norm, kv_norm, sink, frequencies,
        struct, ctypes.addressof(struct), heads, dim, attention.window,
    )  # fmt: skip


def attention_inputs(x: Tensor, positions: Tensor, attention: CpuAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank query [T, q_rank], rotated query [T, h, D], packed window rows [T, bytes] of x [T, H]."""
    x, dim = rows_of("x", x, attention.down.columns), attention.dim
    num_tokens = len(x)
    positions = dense("positions", positions, (num_tokens,), torch.int32)
    low_rank = torch.empty(num_tokens, attention.wq_b.columns)
    q = torch.empty(num_tokens, attention.num_heads, dim)
    window_rows = torch.empty(num_tokens, dim // 32 * 33, dtype=torch.uint8)
    native().attention_inputs(
        attention.address, x.data_ptr(), x.stride(0), positions.data_ptr(), num_tokens,
        low_rank.data_ptr(), q.data_ptr(), window_rows.data_ptr(),
    )  # fmt: skip
    return low_rank, q, window_rows


def main_rows(x: Tensor, positions: Tensor, attention: CpuAttention) -> Tensor:
    """Packed window rows [T, bytes] of x [T, H]."""
    x = rows_of("x", x, attention.down.columns)
    positions = dense("positions", positions, (len(x),), torch.int32)
    window_rows = torch.empty(len(x), attention.dim // 32 * 33, dtype=torch.uint8)
    native().main_rows(
        attention.address, x.data_ptr(), x.stride(0), positions.data_ptr(), len(x), window_rows.data_ptr()
    )
    return window_rows


def project_out(attended: Tensor, attention: CpuAttention) -> Tensor:
    """wo_a per group of heads, then wo_b: [T, h, D] -> [T, H] float32."""
    num_tokens = len(attended)
    attended = dense("attended", attended, (num_tokens, attention.num_heads, attention.dim))
    out = torch.empty(num_tokens, attention.wo_b.rows)
    native().project_out(attention.address, attended.data_ptr(), num_tokens, out.data_ptr())
    return out
