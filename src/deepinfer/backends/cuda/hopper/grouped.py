"""Products of few tokens with a matrix of each group of their columns, by CUDA C++ (`native/grouped_products.cu`).

Matrices stay e4m3 with a power of two for each tile of 32 x 32, as in the checkpoint: half the bytes of bf16. They are
widened in registers, exactly, so results have the bits of `grouped_matmul` with bf16 matrices.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.backends.cuda.native import Kernel, load
from deepinfer.ops.weights import Weight

SOURCE = Path(__file__).parent / "native" / "grouped_products.cu"
ROWS, STEP, TOKENS, TILE = 64, 128, 64, 32
CODE_BYTES = ROWS * STEP
MAX_TOKENS = 64  # up to which this takes less time than bf16 matrices
THREADS, SHARED_BYTES = 384, 222 * 1024
LEAST, MOST = 10, 134  # biased exponents of tiles with which numbers and factors are neither subnormal nor infinite


class Grouped(NamedTuple):
    """Matrices of all groups, one below the other: chunks [rows / 64, steps, 8192 + 32] uint8."""

    chunks: Tensor
    num_groups: int


def kernel_for(device: torch.device) -> Kernel | None:
    """The kernel; None where it cannot be built."""
    return load(SOURCE, "grouped", THREADS, SHARED_BYTES, device.index or 0) if device.type == "cuda" else None


def pack_grouped(weight: Weight, num_groups: int) -> Grouped | None:
    """Pack e4m3 [groups * rows, width] with scales; None where the kernel does not take it."""
    codes, scale = weight.value, weight.scale
    num_rows, width = codes.shape
    if codes.dtype != torch.float8_e4m3fn or scale is None or width % (2 * STEP) or num_rows % (num_groups * ROWS):
        return None
    exponents = scale.view(torch.uint8).int()
    if exponents.shape != (num_rows // TILE, width // TILE) or kernel_for(codes.device) is None:
        return None
    if not LEAST <= int(exponents.min()) <= int(exponents.max()) <= MOST:
        return None
    # Rows: tile, warp, half, line; columns: step, part, half of a part, half of that, four, byte.
    parts = codes.view(torch.uint8).view(-1, 4, 2, 8, width // STEP, 4, 2, 2, 4, 2)
    parts = parts.permute(0, 4, 5, 1, 3, 8, 6, 7, 9, 2).reshape(num_rows // ROWS, width // STEP, CODE_BYTES)
    factors = exponents.view(-1, ROWS // TILE, width // STEP, STEP // TILE).transpose(1, 2) + 120  # 2 ** 120 more
    factors = (factors << 7 | factors << 23).flatten(2).contiguous().view(torch.uint8)
    return Grouped(torch.cat([parts, factors], -1), num_groups)


def grouped_products(x: Tensor, matrices: Grouped) -> Tensor:
    """x [n, groups * width] bf16, dense, times the matrix of each group: [n, groups * rows] bf16."""
    (num_tiles, steps, _), num_tokens = matrices.chunks.shape, len(x)
    out = torch.empty(num_tokens, num_tiles * ROWS, dtype=torch.bfloat16, device=x.device)
    kernel = kernel_for(x.device)
    assert kernel is not None, "matrices are packed only where the kernel is"
    if num_tokens:
        kernel.launch(
            (num_tiles, -(-num_tokens // TOKENS), 1),
            (
                x,
                None,
                matrices.chunks,
                None,
                out,
                None,
                None,
                matrices.num_groups,
                num_tokens,
                0,
                num_tiles * ROWS,
                steps,
            ),
        )
    return out
