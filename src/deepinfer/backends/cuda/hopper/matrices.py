"""Matrices prepared for products: e4m3 with one power-of-two scale a row, or bf16.

The checkpoint scales matrices in tiles of 32 x 32. As with activations (`quant.py`) a row's groups share the largest
of its scales; a matrix that would lose more than a limit is kept in bf16, which holds every e4m3 times a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.backends.cuda.hopper.products import Packed, can_pack, pack_e4m3
from deepinfer.backends.cuda.hopper.quant import E4M3, Rows
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

FOLDING_LIMIT = 1e-5  # of a matrix's norm; rounding results to bf16 costs 2e-3
ROWS_AT_A_TIME = 8192  # that are rounded: they are float32 then
LEAST_PEAK = 1e-30  # of a row, so that one of zeros has a scale


class Matrix(NamedTuple):
    """A matrix [rows, width], or one of each group of columns [groups, rows, width]; whether the input of its products
    is rounded to e4m3, and the dtype of their results."""

    rows: Rows | Packed
    rounds_input: bool
    dtype: torch.dtype


def prepare_matrix(*weights: Weight, dtype: torch.dtype = torch.bfloat16, num_groups: int = 0) -> Matrix:
    """One stored matrix, or several stacked by rows: e4m3 with a scale a row where that loses nothing that counts.

    dtype: of the products' results, bf16 or float32. num_groups: of rows, each a matrix for columns of its own; 0: one
    matrix for all columns.
    """
    shape = (num_groups, -1) if num_groups else (-1,)
    is_quantized = weights[0].is_quantized
    require(
        all(weight.is_quantized == is_quantized for weight in weights),
        "matrices that share their input must all be quantised, or none",
    )
    folded = [_fold(weight) for weight in weights] if is_quantized else []
    if is_quantized and all(lost <= FOLDING_LIMIT for _, _, lost in folded):
        codes = torch.cat([codes.view(torch.uint8) for codes, _, _ in folded]).view(E4M3).unflatten(0, shape)
        scale = torch.cat([scale for _, scale, _ in folded]).unflatten(0, shape)
        if dtype == torch.bfloat16 and can_pack(codes.shape[-2], num_groups or 1, codes.device):
            return Matrix(pack_e4m3(codes, scale), True, dtype)
        return Matrix(Rows(codes, scale), True, dtype)
    values = torch.cat([quant.dequantise(weight, torch.bfloat16) for weight in weights])
    return Matrix(Rows(values.unflatten(0, shape), None), is_quantized, dtype)


def rounded(matrix: Matrix) -> Matrix:
    """A bf16 matrix as e4m3 with a scale a row, 2.7 % of its norm away; its products round their input too, and are
    bf16. One that is e4m3 stays as it is."""
    if matrix.rounds_input:
        return matrix
    assert isinstance(matrix.rows, Rows), "bf16 matrices are not packed"
    parts = [_rounded(values) for values in matrix.rows.values.split(ROWS_AT_A_TIME)]
    codes, scale = (torch.cat(each) for each in zip(*parts, strict=True))
    fits = can_pack(len(codes), 1, codes.device)
    return Matrix(pack_e4m3(codes, scale) if fits else Rows(codes, scale), True, torch.bfloat16)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of [rows, width] bf16, and the least power of two of each row that fits them."""
    peak = values.abs().amax(-1).float().clamp_min(LEAST_PEAK)
    scale = quant.power_of_2(quant.exponent_at_least(peak / quant.FP8_MAX))
    return (values.float() / scale.unsqueeze(1)).to(E4M3), scale


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
