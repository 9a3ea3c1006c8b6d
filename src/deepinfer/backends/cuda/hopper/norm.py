"""Norm weights, and the norm of a row inside kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.numbers import bf16_rounded
from deepinfer.ops.reference import quant
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
