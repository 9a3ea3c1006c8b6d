"""Products with checkpoint matrices, widened once or, when too large, a slice at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

WIDEN_LIMIT_BYTES = 256 << 20  # a matrix (or a layer's experts) that is wider than this stays as stored
SLICE_BYTES = 64 << 20  # how much of a stored matrix is widened at a time


@dataclass(frozen=True)
class Linear:
    """A matrix [rows, columns] ready to multiply: `wide` in the accumulation dtype, or `stored`."""

    wide: Tensor | None
    stored: Weight | None
    rounds_input: bool


def num_columns(weight: Weight) -> int:
    """Columns of a stored matrix; an e2m1 byte holds two."""
    is_packed = weight.is_quantized and weight.value.dtype in (torch.int8, torch.uint8)
    return weight.value.shape[-1] * (2 if is_packed else 1)


def wide_bytes(numerics: Numerics, weight: Weight) -> int:
    """Bytes of the widened matrix or stack of matrices."""
    return weight.value[..., 0].numel() * num_columns(weight) * numerics.accumulate.itemsize


def prepare_linear(numerics: Numerics, *weights: Weight) -> Linear:
    """One matrix, or several stacked by rows that share their input."""
    is_quantized = weights[0].is_quantized
    is_uniform = all(weight.is_quantized == is_quantized for weight in weights)
    require(is_uniform, "matrices that share their input must all be quantised, or none")
    rounds_input = is_quantized and numerics.gemm_inputs
    if len(weights) == 1 and wide_bytes(numerics, weights[0]) > WIDEN_LIMIT_BYTES:
        return Linear(None, weights[0], rounds_input)
    wide = [quant.dequantise(weight, numerics.accumulate) for weight in weights]
    return Linear(wide[0] if len(wide) == 1 else torch.cat(wide), None, rounds_input)


def multiply(numerics: Numerics, x: Tensor, layer: Linear) -> Tensor:
    """x [..., columns] @ matrix.T: [..., rows] float32, the input rounded to fp8 where the mode says so."""
    x = quant.round_fp8(x) if layer.rounds_input else x
    if layer.wide is not None:
        return numerics.matmul(x, layer.wide)
    assert layer.stored is not None
    rows = layer.stored.value.shape[0]
    step = max(1, SLICE_BYTES // (wide_bytes(numerics, layer.stored) // rows) // quant.TILE) * quant.TILE
    pieces = (quant.weight_rows(layer.stored, start, min(start + step, rows)) for start in range(0, rows, step))
    return torch.cat([numerics.matmul(x, quant.dequantise(piece, numerics.accumulate)) for piece in pieces], dim=-1)


def linear(numerics: Numerics, x: Tensor, layer: Linear) -> Tensor:
    """`multiply`, the result rounded as an activation."""
    return numerics.act(multiply(numerics, x, layer))
