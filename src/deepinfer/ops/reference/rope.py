"""Rotary embedding of adjacent pairs (RoFormer, arXiv:2104.09864), with YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.weights import RopeSpec


def rope_frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """Radians per position of each pair: [dim / 2] float32."""
    steps = torch.arange(0, spec.dim, 2, dtype=torch.float32)
    frequency = 1.0 / (spec.theta ** (steps / spec.dim))
    if spec.factor is not None:
        low = max(math.floor(_dimension_turning(spec, spec.beta_fast)), 0)
        high = min(math.ceil(_dimension_turning(spec, spec.beta_slow)), spec.dim - 1)
        ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
        keep = 1 - ramp.clamp(0, 1)
        frequency = frequency / spec.factor * (1 - keep) + frequency * keep
    return frequency.to(device)


def _dimension_turning(spec: RopeSpec, turns: float) -> float:
    """The pair, as a real number, that turns this often within the trained positions."""
    return spec.dim * math.log(spec.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))


def rotation(numerics: Numerics, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Unit complex numbers [positions, dim / 2] that turn a pair by its angle."""
    angles = torch.outer(positions.float(), frequencies).to(numerics.accumulate)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the last pairs of x by `turn`, which broadcasts: [..., D] float32, a new tensor.

    The conjugate of `turn` rotates back.
    """
    result = x.clone(memory_format=torch.contiguous_format)
    tail = result[..., -2 * turn.shape[-1] :]
    torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(turn)
    return result
