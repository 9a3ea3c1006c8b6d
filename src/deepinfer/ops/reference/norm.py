"""RMS norm: x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.weights import NormWeights


@dataclass(frozen=True)
class Norm:
    """weight [width] float32."""

    weight: Tensor
    eps: float


def prepare_norm(norm: NormWeights) -> Norm:
    """Widen the weight."""
    return Norm(quant.dequantise(norm.weight, torch.float32), norm.eps)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept: [..., 1] float32."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(numerics: Numerics, x: Tensor, norm: Norm) -> Tensor:
    """[..., width] float32 -> the same, rounded as an activation."""
    if numerics.fuses:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return numerics.act(norm.weight * (x * rms_scale(x, norm.eps)))
