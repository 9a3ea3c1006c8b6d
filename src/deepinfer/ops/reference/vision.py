"""The image encoder: patches of one image through a vision transformer, then cells for the language model.

An image is encoded alone, so its embedding does not depend on what else is encoded. A vision
transformer (arXiv:2010.11929) with rotary positions over rows and columns, RMS norm and SwiGLU;
merge x merge patches become one cell, which two products bring to the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import AlignerWeights, BiasedWeight, PatchWeights, VisionBlockWeights


@dataclass(frozen=True)
class Biased:
    """A matrix and its bias in the accumulation dtype."""

    matrix: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Patches:
    """The first product. values [256] float32: what each sample of a pixel counts."""

    linear: Biased
    values: Tensor
    size: int


@dataclass(frozen=True)
class VisionBlock:
    """One layer. frequencies [head dim / 4] float32: radians from one patch to the next."""

    norm1: Norm
    wqkv: Biased
    wo: Biased
    norm2: Norm
    w1: Biased
    w2: Biased
    num_heads: int
    frequencies: Tensor


@dataclass(frozen=True)
class Aligner:
    """The last norm and the two products after the merge."""

    norm: Norm
    w1: Biased
    w2: Biased
    merge: int


def prepare_patches(numerics: Numerics, patches: PatchWeights) -> Patches:
    """Widen the product, and look samples up: (x / 255 - 0.5) / 0.5, rounded to bf16 as it is released."""
    device = patches.linear.weight.value.device
    samples = torch.arange(256, dtype=torch.float32, device=device)
    values = ((samples / 255 - 0.5) / 0.5).to(torch.bfloat16).float()
    return Patches(_prepare(numerics, patches.linear), values, patches.size)


def embed_patches(numerics: Numerics, pixels: Tensor, patches: Patches) -> Tensor:
    """pixels [height, width, 3] uint8 -> patches [rows * columns, D] float32 in reading order."""
    expect("pixels", pixels, (None, None, 3), torch.uint8)
    size = patches.size
    height, width, _ = pixels.shape
    require(
        height % size == 0 and width % size == 0, f"pixels are {height} x {width}; both must be multiples of {size}"
    )
    grid = pixels.view(height // size, size, width // size, size, 3).permute(0, 2, 4, 1, 3)
    flat = grid.reshape(-1, 3 * size * size)  # a patch is channel, row, column
    return _multiply(numerics, patches.values[flat.int()], patches.linear)


def prepare_vision_block(numerics: Numerics, block: VisionBlockWeights) -> VisionBlock:
    """Widen the matrices and work out the rotation."""
    half = block.norm1.weight.value.shape[0] // block.num_heads // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32, device=block.norm1.weight.value.device)
    return VisionBlock(
        norm1=prepare_norm(block.norm1),
        wqkv=_prepare(numerics, block.wqkv),
        wo=_prepare(numerics, block.wo),
        norm2=prepare_norm(block.norm2),
        w1=_prepare(numerics, block.w1),
        w2=_prepare(numerics, block.w2),
        num_heads=block.num_heads,
        frequencies=1.0 / (block.theta ** (steps / half)),
    )


def vision_block(numerics: Numerics, patches: Tensor, columns: int, block: VisionBlock) -> Tensor:
    """patches [rows * columns, D] float32 of one image -> the same; every patch sees all of them."""
    expect("patches", patches, (None, block.norm1.weight.shape[0]))
    require(patches.shape[0] % columns == 0, f"{patches.shape[0]} patches are no rows of {columns}")
    inner = rms_norm(numerics, patches, block.norm1)
    q, k, v = (
        part.unflatten(-1, (block.num_heads, -1)).transpose(0, 1)
        for part in _multiply(numerics, inner, block.wqkv).chunk(3, -1)
    )  # [heads, patches, dim]
    angles = _angles(patches.shape[0] // columns, columns, block.frequencies)
    attended = _attention(numerics, numerics.act(_rotate(q, angles)), numerics.act(_rotate(k, angles)), v)
    patches = numerics.act(patches + _multiply(numerics, attended.transpose(0, 1).flatten(1), block.wo))
    inner = rms_norm(numerics, patches, block.norm2)
    gate, up = _multiply(numerics, inner, block.w1).chunk(2, -1)
    hidden = numerics.act(numerics.act(F.silu(gate)) * up)
    return numerics.act(patches + _multiply(numerics, hidden, block.w2))


def prepare_aligner(numerics: Numerics, aligner: AlignerWeights) -> Aligner:
    """Widen norm and matrices."""
    return Aligner(
        prepare_norm(aligner.norm), _prepare(numerics, aligner.w1), _prepare(numerics, aligner.w2), aligner.merge
    )


def align(numerics: Numerics, patches: Tensor, columns: int, aligner: Aligner) -> Tensor:
    """patches [rows * columns, D] float32 -> cells [n * k, H] float32 in reading order, zeros beyond the edges."""
    expect("patches", patches, (None, aligner.norm.weight.shape[0]))
    require(patches.shape[0] % columns == 0, f"{patches.shape[0]} patches are no rows of {columns}")
    merge, rows = aligner.merge, patches.shape[0] // columns
    grid = rms_norm(numerics, patches, aligner.norm).unflatten(0, (rows, columns))
    grid = F.pad(grid, (0, 0, 0, -columns % merge, 0, -rows % merge))
    cells = grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # [n, merge, k, merge, D]
    cells = cells.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)  # a cell is channel, row, column
    return _multiply(numerics, numerics.act(F.gelu(_multiply(numerics, cells, aligner.w1))), aligner.w2)


def _prepare(numerics: Numerics, linear: BiasedWeight) -> Biased:
    bias = None if linear.bias is None else quant.dequantise(linear.bias, numerics.accumulate)
    return Biased(quant.dequantise(linear.weight, numerics.accumulate), bias)


def _multiply(numerics: Numerics, x: Tensor, layer: Biased) -> Tensor:
    return numerics.act(F.linear(numerics.wide(x), layer.matrix, layer.bias).float())


def _attention(numerics: Numerics, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k / sqrt(dim)) v: [heads, patches, dim]."""
    if numerics.fuses:
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    scale = q.shape[-1] ** -0.5
    heads = zip(q, k, v, strict=True)  # one by one, since scores of all heads would be large
    return numerics.act(torch.stack([((a @ b.T) * scale).softmax(-1) @ c for a, b, c in heads]))


def _angles(rows: int, columns: int, frequencies: Tensor) -> Tensor:
    """Rotation of each patch [rows * columns, head dim / 2]: the first half by row, the second by column."""
    device = frequencies.device
    row = torch.arange(rows, dtype=torch.float32, device=device).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float32, device=device).repeat(rows)
    return torch.cat([torch.outer(row, frequencies), torch.outer(column, frequencies)], -1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) whose pairs are the two halves of a head: [heads, patches, dim]."""
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
