"""Activations as e4m3 with one power-of-two scale a row.

The checkpoint scales them in groups of 32. The scales are powers of two, so a row's groups can share the largest:
codes move down by whole exponents, exactly while they stay normal. What falls below is lost, some 1e-6 of a row's
norm or less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import (
    INVERSE_FP8_MAX,
    e4m3_bytes,
    exponent_above,
    from_e4m3_bytes,
    power,
)
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference.shapes import expect

E4M3 = torch.float8_e4m3fn


class Rows(NamedTuple):
    """Activations or a matrix: [n, width] e4m3 with scale [n] float32, or [n, width] bf16 without one.

    Of several groups: [groups, n, width] and [groups, n].
    """

    values: Tensor
    scale: Tensor | None


@triton.jit
def rounded_groups(x):
    """x [groups, 32] float32 -> its codes as float32, and the exponent byte of each group's scale [groups]."""
    peak = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    exponent = exponent_above(peak * INVERSE_FP8_MAX)
    return from_e4m3_bytes(e4m3_bytes(x * power(254 - tl.minimum(exponent, 253))[:, None])), exponent


@triton.jit
def on_scale(codes, exponent, largest):
    """e4m3 bytes of such codes on the scale of their row."""
    return e4m3_bytes(codes * power(tl.maximum(exponent - largest + 127, 1))[:, None])


@triton.jit
def fold_groups(x):
    """x [groups, 32] float32 -> e4m3 bytes and the row's scale: quantised by groups, then on one scale."""
    codes, exponent = rounded_groups(x)
    largest = tl.max(exponent, 0)
    return on_scale(codes, exponent, largest), power(largest)


@triton.jit
def quantise_kernel(x, codes, scale, row_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """One row's codes and its scale."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * row_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    folded, factor = fold_groups(values)
    tl.store(codes + row * WIDTH + column, folded, mask=column < WIDTH)
    tl.store(scale + row, factor)


def quantise(x: Tensor) -> Rows:
    """x [n, width] bf16, rows dense -> e4m3 rows."""
    expect("activations", x, (None, None), torch.bfloat16)
    (num_rows, width), device = x.shape, x.device
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        groups = next_power_of_2(-(-width // 32))
        quantise_kernel[(num_rows,)](
            x, codes, scale, x.stride(0), width, groups, num_warps=8 if groups > 64 else 4, launch_pdl=True
        )
    return Rows(codes.view(E4M3), scale)


def widened(rows: Rows) -> Rows:
    """e4m3 rows as bf16, exactly."""
    assert rows.scale is not None
    return Rows(rows.values.to(torch.bfloat16) * rows.scale.to(torch.bfloat16).unsqueeze(-1), None)
