"""Activations and matrices as e4m3 with one power-of-two scale a row.

The checkpoint scales activations in groups of 32 and matrices in tiles of 32 x 32. Both are
powers of two, so a row's groups can share the largest of its scales: codes move down by whole
exponents, exactly while they stay normal. What falls below is lost, some 1e-6 of a row's norm or
less; a matrix that would lose more is kept in bf16, which holds every e4m3 times a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.numbers import (
    INVERSE_FP8_MAX,
    e4m3_bytes,
    exponent_above,
    from_e4m3_bytes,
    power,
)
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import Weight

E4M3 = torch.float8_e4m3fn
FOLDING_LIMIT = 1e-5  # of a matrix's norm; rounding results to bf16 costs 2e-3


class Rows(NamedTuple):
    """Activations or a matrix: [n, width] e4m3 with scale [n] float32, or [n, width] bf16 without one."""

    values: Tensor
    scale: Tensor | None


class Matrix(NamedTuple):
    """A matrix [rows, width], and whether the input of its products is rounded to e4m3."""

    rows: Rows
    rounds_input: bool


@triton.jit
def fold_groups(x, GROUPS: tl.constexpr):
    """x [GROUPS, 32] float32 -> e4m3 bytes and the row's scale: quantised by groups, then on one scale."""
    peak = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    exponent = exponent_above(peak * INVERSE_FP8_MAX)
    codes = from_e4m3_bytes(e4m3_bytes(x * power(254 - tl.minimum(exponent, 253))[:, None]))
    largest = tl.max(exponent, 0)
    down = power(tl.maximum(exponent - largest + 127, 1))
    return e4m3_bytes(codes * down[:, None]), power(largest)


@triton.jit
def quantise_kernel(x, codes, scale, row_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * row_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    folded, factor = fold_groups(values, GROUPS)
    tl.store(codes + row * WIDTH + column, folded, mask=column < WIDTH)
    tl.store(scale + row, factor)


def quantise(x: Tensor) -> Rows:
    """x [n, width] bf16, rows dense -> e4m3 rows."""
    expect("activations", x, (None, None), torch.bfloat16)
    (num_rows, width), device = x.shape, x.device
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        groups = triton.next_power_of_2(-(-width // 32))
        quantise_kernel[(num_rows,)](x, codes, scale, x.stride(0), width, groups, num_warps=8 if groups > 64 else 4)
    return Rows(codes.view(E4M3), scale)


def widened(rows: Rows) -> Rows:
    """e4m3 rows as bf16, exactly."""
    assert rows.scale is not None
    return Rows(rows.values.to(torch.bfloat16) * rows.scale.to(torch.bfloat16).unsqueeze(1), None)


def prepare_matrix(*weights: Weight) -> Matrix:
    """One stored matrix, or several stacked by rows: e4m3 with a scale a row where that loses nothing that counts."""
    is_quantized = weights[0].is_quantized
    require(
        all(weight.is_quantized == is_quantized for weight in weights),
        "matrices that share their input must all be quantised, or none",
    )
    folded = [_fold(weight) for weight in weights] if is_quantized else []
    if is_quantized and all(lost <= FOLDING_LIMIT for _, _, lost in folded):
        codes = torch.cat([codes.view(torch.uint8) for codes, _, _ in folded]).view(E4M3)
        return Matrix(Rows(codes, torch.cat([scale for _, scale, _ in folded])), True)
    return Matrix(Rows(torch.cat([quant.dequantise(weight, torch.bfloat16) for weight in weights]), None), is_quantized)


def _fold(weight: Weight) -> tuple[Tensor, Tensor, float]:
    """e4m3 codes on the largest scale of their row, that scale, and the share of the norm that is lost."""
    assert weight.scale is not None
    exact = quant.dequantise(weight, torch.float32)
    exponents = weight.scale.view(torch.uint8).int().amax(-1)
    if len(exponents) != len(exact):
        exponents = exponents.repeat_interleave(quant.TILE)[: len(exact)]
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 127)
    codes = (exact / scale.unsqueeze(1)).to(E4M3)
    lost = (codes.float() * scale.unsqueeze(1) - exact).norm() / exact.norm().clamp_min(1e-30)
    return codes, scale, float(lost)
