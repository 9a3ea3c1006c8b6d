"""Engram: table rows gathered as they are stored, and the gated update of the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.numbers import bf16_rounded, from_e4m3_bytes, to_bf16, ue8m0
from deepinfer.backends.cuda.hopper.panels import Panels, empty_panels, write_panels
from deepinfer.backends.cuda.hopper.products import Packed
from deepinfer.backends.cuda.hopper.quant import fold_groups
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import EngramWeights


@dataclass(frozen=True)
class Engram:
    """Table codes [rows, width] and scales [rows, width / 32] as bytes; weight = q_weight * k_weight [m, H] float32."""

    codes: Tensor
    scales: Tensor
    wkv: Matrix
    weight: Tensor
    norm_eps: float


def prepare_engram(engram: EngramWeights) -> Engram:
    """Pack wkv, multiply the norm weights."""
    require(engram.table.scale is not None, "an engram table is e4m3 with scales")
    assert engram.table.scale is not None
    q, k = (quant.dequantise(weight, torch.float32) for weight in (engram.q_weight, engram.k_weight))
    codes, scales = (part.contiguous().view(torch.uint8) for part in (engram.table.value, engram.table.scale))
    return Engram(codes, scales, prepare_matrix(engram.wkv), (q * k).contiguous(), engram.norm_eps)


@triton.jit
def table_groups(
    codes, scales, rows, token, num_rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """One token's table rows in groups [GROUPS, 32], float32 rounded to bf16; zeros for a row outside the table."""
    group, member = tl.arange(0, GROUPS), tl.arange(0, 32)
    column, part = group // (WIDTH // 32), group % (WIDTH // 32)
    row = tl.load(rows + token * COLUMNS + column, mask=column < COLUMNS, other=-1)
    is_here = (row >= 0) & (row < num_rows)
    code = tl.load(codes + (row * WIDTH + part * 32)[:, None] + member[None, :], mask=is_here[:, None], other=0)
    factor = tl.load(scales + row * (WIDTH // 32) + part, mask=is_here, other=0)
    return bf16_rounded(from_e4m3_bytes(code) * ue8m0(factor)[:, None])


@triton.jit
def gather_kernel(
    codes, scales, rows, out, num_rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """One token's table rows, side by side."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    values = table_groups(codes, scales, rows, token, num_rows, COLUMNS, WIDTH, GROUPS)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + token * COLUMNS * WIDTH + column, to_bf16(values), mask=column < COLUMNS * WIDTH)


@triton.jit
def gather_panels_kernel(
    codes, scales, rows, out, out_scale, num_rows, size,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The same, rounded to e4m3 on one scale, to the token's place."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    folded, scale = fold_groups(table_groups(codes, scales, rows, token, num_rows, COLUMNS, WIDTH, GROUPS))
    write_panels(out, out_scale, token, size, folded, scale, PADDED, GROUPS)


@triton.jit
def gate_kernel(
    streams, memory, weight, is_image, out, eps, scale,
    HAS_IMAGES: tl.constexpr, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One stream of one token: stream + sigmoid(signed_sqrt(<norm(stream), norm(key)> weighted)) * value.

    A token's streams follow each other: all read its value, which the L2 cache then holds.
    """
    begin()
    token, stream = tl.program_id(0).to(tl.int64) // STREAMS, tl.program_id(0) % STREAMS
    column = tl.arange(0, TILE)
    is_here = column < HIDDEN
    at = (token * STREAMS + stream) * HIDDEN + column
    x = tl.load(streams + at, mask=is_here, other=0.0).to(tl.float32)
    memory += token * (STREAMS + 1) * HIDDEN
    key = tl.load(memory + stream * HIDDEN + column, mask=is_here, other=0.0).to(tl.float32)
    value = tl.load(memory + STREAMS * HIDDEN + column, mask=is_here, other=0.0).to(tl.float32)
    weights = tl.load(weight + stream * HIDDEN + column, mask=is_here, other=0.0)
    norms = tl.rsqrt(tl.sum(x * x) / HIDDEN + eps) * tl.rsqrt(tl.sum(key * key) / HIDDEN + eps)
    dot = tl.sum(x * weights * key) * norms * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = tl.sigmoid(tl.where(dot < 0, -root, root))
    if HAS_IMAGES:
        gate = tl.where(tl.load(is_image + token) != 0, 0.0, gate)
    tl.store(out + at, to_bf16(x + gate * value), mask=is_here)


def gathered(rows: Tensor, engram: Engram) -> Tensor:
    """The table's rows [T, columns * width] bf16 of rows [T, columns] int64."""
    (num_tokens, columns), width = rows.shape, engram.codes.shape[1]
    out = torch.empty(num_tokens, columns * width, dtype=torch.bfloat16, device=rows.device)
    gather_kernel[(num_tokens,)](
        engram.codes, engram.scales, rows.contiguous(), out, len(engram.codes),
        columns, width, next_power_of_2(columns * width // 32), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def gathered_panels(rows: Tensor, engram: Engram, padded_width: int) -> Panels:
    """The same as `quantise_panels` makes of them, in its bits."""
    (num_tokens, columns), width = rows.shape, engram.codes.shape[1]
    panels = empty_panels(num_tokens, padded_width, None, rows.device)
    gather_panels_kernel[(num_tokens,)](
        engram.codes, engram.scales, rows.contiguous(), panels.codes, panels.scale, len(engram.codes), panels.size,
        columns, width, padded_width, next_power_of_2(padded_width // 32), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return panels


def engram(streams: Tensor, rows: Tensor, is_image: Tensor | None, engram: Engram) -> Tensor:
    """streams + gate * value: streams [T, m, H] bf16, rows [T, columns] int64 -> [T, m, H] bf16."""
    num_streams, hidden = engram.weight.shape
    expect("streams", streams, (None, num_streams, hidden), torch.bfloat16)
    num_tokens = len(streams)
    expect("engram rows", rows, (num_tokens, None), torch.int64)
    if is_image is not None:
        expect("is_image", is_image, (num_tokens,), torch.bool)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    memory = _memory(rows, engram)
    images = is_image.contiguous().view(torch.uint8) if is_image is not None else engram.codes
    gate_kernel[(num_tokens * num_streams,)](
        streams.contiguous(), memory, engram.weight, images, out, engram.norm_eps, hidden**-0.5,
        is_image is not None, hidden, num_streams, next_power_of_2(hidden), num_warps=8, launch_pdl=True,
    )  # fmt: skip
    return out


def _memory(rows: Tensor, engram: Engram) -> Tensor:
    """Keys of the streams and the value they share [T, (m + 1) * H] bf16."""
    matrix = engram.wkv.rows
    if not isinstance(matrix, Packed):
        return linear(gathered(rows, engram), engram.wkv)
    width = rows.shape[1] * engram.codes.shape[1]
    require(width == matrix.width, f"a token's table rows are {width} wide; they must be {matrix.width}")
    return linear(gathered_panels(rows, engram, matrix.padded_width), engram.wkv)
