"""Products of bf16 with a tile of results for nearly each multiprocessor, or more: the head, and wide prompts.

Tiles come by TMA. A program takes tiles in turn, and the first steps of the next one are under way while the results
of one leave. Tiles of the same matrix rows follow each other, so that memory is read once. Sums run along the width as
in `linear.py`: the results have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import multiply, to_bf16
from deepinfer.backends.cuda.hopper.sizes import cdiv
from deepinfer.backends.cuda.native import num_multiprocessors

ROW_TILE, STEP, PARTS = 256, 64, 4  # a tile's results leave in parts of its rows, through one buffer
MIN_TOKENS, MIN_TILES = 33, 96  # fewer tokens read the matrix and little else; fewer tiles leave much of the card idle


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def store(out, token, row, total):
    """A part of a tile, rounded to what the result holds."""
    out.store([token, row], to_bf16(total) if out.dtype == tl.bfloat16 else total)


@triton.jit
def large_kernel(
    x, matrix, out, num_tokens, num_rows,
    WIDTH: tl.constexpr, TOKEN_TILE: tl.constexpr, ROW_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out [tokens, rows] = x [tokens, WIDTH] @ matrix [rows, WIDTH].T, some tiles of it."""
    begin()
    token_tiles = tl.cdiv(num_tokens, TOKEN_TILE)
    num_tiles = token_tiles * (num_rows // ROW_TILE)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        token, row = tile % token_tiles * TOKEN_TILE, tile // token_tiles * ROW_TILE
        total = tl.zeros([TOKEN_TILE, ROW_TILE], tl.float32)
        for start in range(0, WIDTH, STEP):
            total = multiply(x.load([token, start]), matrix.load([row, start]).T, total, 0)
        left, right = halves(total)
        first, second = halves(left)
        store(out, token, row, first)
        store(out, token, row + ROW_TILE // 4, second)
        third, fourth = halves(right)
        store(out, token, row + ROW_TILE // 2, third)
        store(out, token, row + ROW_TILE // 4 * 3, fourth)


def is_large(x: Tensor, matrix: Tensor, out: Tensor) -> bool:
    """Whether a product has enough tiles, whole ones but for tokens, and its tensors lie as TMA wants them."""
    rows, width = matrix.shape
    is_whole = rows % ROW_TILE == 0 and width % STEP == 0
    has_work = len(x) >= MIN_TOKENS and _num_tiles(len(x), rows) >= MIN_TILES
    return has_work and is_whole and all(map(_is_aligned, (x, matrix, out)))


def large_products(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """x [n, width] @ matrix [rows, width].T, both bf16, to out [n, rows] float32 or bf16; they must be large."""
    (rows, width), tile = matrix.shape, _token_tile(len(x))
    large_kernel[(min(_num_tiles(len(x), rows), num_multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile, STEP]),
        TensorDescriptor.from_tensor(matrix, [ROW_TILE, STEP]),
        TensorDescriptor.from_tensor(out, [tile, ROW_TILE // PARTS]),
        len(x), rows, width, tile, ROW_TILE, STEP, num_warps=tile // 16, num_stages=4, launch_pdl=True,
    )  # fmt: skip


def _token_tile(num_tokens: int) -> int:
    return 64 if num_tokens <= 64 else 128


def _num_tiles(num_tokens: int, num_rows: int) -> int:
    return cdiv(num_tokens, _token_tile(num_tokens)) * (num_rows // ROW_TILE)


def _is_aligned(tensor: Tensor) -> bool:
    row_bytes = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and row_bytes % 16 == 0 and tensor.data_ptr() % 16 == 0
