"""Rotary embedding of adjacent pairs (RoFormer, arXiv:2104.09864), with YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import functools
import math
from typing import cast

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.weights import RopeSpec


@functools.cache
def rope_frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """Radians per position of each pair: [dim / 2] float32; one tensor for all layers that rotate alike."""
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


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a pair and of its swapped self: cos [positions, dim / 2, 1], (-sin, sin) [positions, dim / 2, 2]."""
    angles = torch.outer(positions.float(), frequencies)
    sin = angles.sin()
    return angles.cos().unsqueeze(-1), torch.stack([-sin, sin], dim=-1)


def batch_rotation(batch: TokenBatch, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """`rotation` by the positions of a batch, worked out once for all its layers."""
    key = ("rotation", id(frequencies))  # the value keeps `frequencies`, so its id stays its own
    found = batch.once(key, lambda: (*rotation(batch.positions, frequencies), frequencies))
    return cast(tuple[Tensor, Tensor], found[:2])


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], *, backwards: bool = False) -> Tensor:
    """Rotate the last pairs of x by `turn`: [positions, (heads,) D] float32, a new tensor.

    Plain real products: torch's complex ones may contract them, and a last bit decides a cache value.
    """
    cos, sin = turn if x.ndim == 2 else (part.unsqueeze(1) for part in turn)
    sin = -sin if backwards else sin
    result = x.clone(memory_format=torch.contiguous_format)
    pairs = result[..., x.shape[-1] - 2 * cos.shape[-2] :].unflatten(-1, (-1, 2))
    torch.add(pairs * cos, pairs.flip(-1).mul_(sin), out=pairs)
    return result
