"""Norm weights, the norm of a row inside kernels, and one that is a kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import bf16_rounded, to_bf16
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import NormWeights


@dataclass(frozen=True)
class Norm:
    """weight [width] float32."""

    weight: Tensor
    eps: float


def prepare_norm(norm: NormWeights) -> Norm:
    """Widen the weight."""
    return Norm(quant.dequantise(norm.weight, torch.float32).contiguous(), norm.eps)


@triton.jit
def rms_norm(x, weight, WIDTH: tl.constexpr, eps):
    """x and weight [n] or [n, 2] float32, zero past WIDTH -> the same shape, rounded to bf16."""
    squares = x * x
    total = tl.sum(squares)
    return bf16_rounded(weight * (x * tl.rsqrt(total / WIDTH + eps)))


@triton.jit
def norm_kernel(x, weight, eps, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """One row."""
    begin()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    is_here = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=is_here, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=is_here, other=0.0)
    tl.store(out + row * WIDTH + column, to_bf16(rms_norm(value, weights, WIDTH, eps)), mask=is_here)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """x [n, width] bf16 -> the same shape in bf16."""
    width, x = len(norm.weight), x.contiguous()
    expect("the norm's x", x, (None, width), torch.bfloat16)
    out = torch.empty_like(x)
    if len(x):
        norm_kernel[(len(x),)](
            x, norm.weight, norm.eps, out, width, next_power_of_2(width), num_warps=8, launch_pdl=True
        )
    return out
