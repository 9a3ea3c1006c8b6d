"""The reference and the native op table in fast precision, and how far their results may lie apart."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import INPUT_PARTS
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build
from deepinfer.ops.weights import NormWeights, Weight


@functools.cache
def reference() -> Ops:
    return build({"reference": reference_ops("fast")})


@functools.cache
def cpu() -> Ops:
    return build({"reference": reference_ops("fast"), "cpu": cpu_ops()})


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    native().set_num_threads(ctypes.c_int64(count))
    try:
        yield
    finally:
        native().set_num_threads(1)


@contextlib.contextmanager
def tiles(wanted: bool) -> Iterator[None]:
    """Whether tiles form all products or none: those of matrices, of attention and of index scores."""
    before = native().tile_parts()
    native().set_tile_parts(INPUT_PARTS if wanted else 0)
    try:
        yield
    finally:
        native().set_tile_parts(before)


def random_weight(*shape: int, seed: int) -> Weight:
    """bf16, of size 1 / sqrt(columns)."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return Weight((values * shape[-1] ** -0.5).to(torch.bfloat16))


def random_norm(width: int, seed: int) -> NormWeights:
    values = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return NormWeights(Weight(values.to(torch.bfloat16)), 1e-6)


def spread(tensor: Tensor) -> Tensor:
    """The same values, no two of them side by side in memory."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]
