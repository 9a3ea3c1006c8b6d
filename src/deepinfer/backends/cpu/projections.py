"""Projections into and out of the attention: low-rank query, window rows, grouped output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.backends.cpu.matrix import Matrix


@dataclass(frozen=True)
class CpuAttention:
    """Attention of one layer, packed for the native library.

    down: wq_a above wkv, [q_rank + dim, H]. wo_a: one matrix per group, [out_rank, heads * dim / groups].
    q_norm [q_rank], kv_norm [dim], sink [heads], frequencies [rope dim / 2] (radians per position): float32.
    """

    down: Matrix
    q_norm: Tensor
    q_eps: float
    wq_b: Matrix
    kv_norm: Tensor
    kv_eps: float
    sink: Tensor
    wo_a: tuple[Matrix, ...]
    wo_b: Matrix
    frequencies: Tensor
    num_heads: int
    dim: int
    window: int
