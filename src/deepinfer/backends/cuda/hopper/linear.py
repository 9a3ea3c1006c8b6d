"""Products with prepared matrices: packed ones by CUDA C++ (`products.py`), others by Triton,
large ones of bf16 by a kernel of their own (`large_products.py`).

The matrix is the left operand here: its rows fill the 64 rows that a Hopper matrix instruction wants
even when there are few tokens, and tokens are the narrow side. A result has the same bits
whatever the number of tokens: sums run along the width in one order, and a tile of tokens only
decides how many of them share a load of the matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.attended import AttendedPanels, group_panels, group_rows
from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.large_products import is_large, large_products
from deepinfer.backends.cuda.hopper.matrices import Matrix
from deepinfer.backends.cuda.hopper.numbers import multiply, to_bf16
from deepinfer.backends.cuda.hopper.panels import Panels, quantise_panels
from deepinfer.backends.cuda.hopper.products import Packed, products
from deepinfer.backends.cuda.hopper.quant import Rows, quantise, widened
from deepinfer.backends.cuda.hopper.sizes import cdiv
from deepinfer.ops.reference.shapes import expect, require

PIECES, PIECE_WIDTH = 4, 128  # of a width: they are multiples of the latter, or there is one


@triton.jit
def matmul_kernel(
    x, x_scale, matrix, matrix_scale, out,
    num_tokens, x_stride, matrix_stride, out_stride, x_group, matrix_group, out_group,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_SCALES: tl.constexpr, IMPRECISE: tl.constexpr,
    TOKEN_TILE: tl.constexpr, ROW_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of out [tokens, ROWS] = x [tokens, WIDTH] @ matrix [ROWS, WIDTH].T of one group."""
    begin()
    group = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    row = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    step = tl.arange(0, STEP)
    is_token, is_row = token < num_tokens, row < ROWS
    x_at = x + group * x_group + tl.where(is_token, token, 0).to(tl.int64)[None, :] * x_stride + step[:, None]
    matrix_at = (
        matrix + group * matrix_group + tl.where(is_row, row, 0).to(tl.int64)[:, None] * matrix_stride + step[None, :]
    )
    total = tl.zeros([ROW_TILE, TOKEN_TILE], tl.float32)
    for start in range(0, WIDTH, STEP):
        if WIDTH % STEP == 0:
            left, right = tl.load(matrix_at), tl.load(x_at)
        else:
            left = tl.load(matrix_at, mask=step[None, :] < WIDTH - start, other=0.0)
            right = tl.load(x_at, mask=step[:, None] < WIDTH - start, other=0.0)
        total = multiply(left, right, total, IMPRECISE)
        x_at += STEP
        matrix_at += STEP
    if HAS_SCALES:
        total *= tl.load(matrix_scale + group * ROWS + row, mask=is_row, other=0.0)[:, None]
        total *= tl.load(x_scale + group * num_tokens + token, mask=is_token, other=0.0)[None, :]
    result = tl.trans(total)
    if out.dtype.element_ty == tl.bfloat16:
        result = to_bf16(result)
    out_at = out + group * out_group + token.to(tl.int64)[:, None] * out_stride + row[None, :]
    tl.store(out_at, result, mask=is_token[:, None] & is_row[None, :])


def tiles(num_tokens: int, num_rows: int, is_narrow: bool) -> dict[str, int]:
    """Launch options of a product with this many tokens and matrix rows; is_narrow: of bytes, else of bf16.

    Small ones read the matrix and little else: many short programs that load far ahead.
    """
    if num_tokens <= 64 or num_rows <= 512:
        token_tile = 16 if num_tokens <= 16 else 32
        return {
            "TOKEN_TILE": token_tile,
            "ROW_TILE": 64,
            "STEP": 128,
            "num_warps": 4,
            "num_stages": 6 if is_narrow else 4,
        }
    step = 128 if is_narrow else 64
    row_tile, num_stages = (256, 3) if is_narrow and num_rows >= 16384 else (128, 4)
    return {"TOKEN_TILE": 128, "ROW_TILE": row_tile, "STEP": step, "num_warps": 8, "num_stages": num_stages}


def matmul(x: Rows, matrix: Rows, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """x [n, width] @ matrix [rows, width].T -> [n, rows], in `out` if it is given; both e4m3, or both bf16."""
    require(x.values.dtype == matrix.values.dtype, "both sides of a product have one format")
    num_tokens, (num_rows, width) = x.values.shape[0], matrix.values.shape
    require(x.values.shape[1] == width, f"x is {x.values.shape[1]} wide; it must be {width}")
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.values.device)
    expect("result", out, (num_tokens, num_rows), dtype)
    require(out.stride(1) == 1, "the numbers of a row of the result must lie side by side")
    if matrix.scale is None and is_large(x.values, matrix.values, out):
        large_products(x.values, matrix.values, out)
    else:
        _launch(x, matrix, out, num_tokens, (x.values.stride(0), width, out.stride(0)), (0, 0, 0), (num_rows, width, 1))
    return out


def grouped_linear(x: Tensor | AttendedPanels, matrix: Matrix) -> Tensor:
    """Each group with its matrix: x [n, groups, width] bf16 -> [n, groups, rows] bf16, dense by group.

    The input is rounded to e4m3, by groups, where the checkpoint expects it, or has been.
    """
    rows = matrix.rows
    if isinstance(rows, Packed):
        panels = x.panels if isinstance(x, AttendedPanels) else group_panels(x, rows.padded_width)
        shape = len(rows.chunks), panels.num_tokens, rows.num_rows
        return products(panels, rows).reshape(shape).transpose(0, 1)
    if isinstance(x, AttendedPanels):
        x = x.heads().view(x.panels.num_tokens, x.num_groups, -1)
    groups = group_rows(x) if matrix.rounds_input else Rows(x.transpose(0, 1), None)
    return _grouped_matmul(groups if rows.scale is not None or groups.scale is None else widened(groups), rows)


def _grouped_matmul(x: Rows, matrices: Rows) -> Tensor:
    """x [groups, n, width] @ matrices [groups, rows, width] of its group: [n, groups, rows] bf16."""
    (groups, rows, width), num_tokens = matrices.values.shape, x.values.shape[1]
    out = torch.empty(num_tokens, groups, rows, dtype=torch.bfloat16, device=x.values.device)
    strides = x.values.stride(1), width, groups * rows
    _launch(x, matrices, out, num_tokens, strides, (x.values.stride(0), rows * width, rows), (rows, width, groups))
    return out


def _launch(
    x: Rows,
    matrix: Rows,
    out: Tensor,
    num_tokens: int,
    strides: tuple[int, int, int],
    group_strides: tuple[int, int, int],
    shape: tuple[int, int, int],
) -> None:
    num_rows, width, groups = shape
    if not num_tokens:
        return
    has_scales = matrix.scale is not None
    options = tiles(num_tokens, num_rows * groups, has_scales)
    grid = (cdiv(num_tokens, options["TOKEN_TILE"]), cdiv(num_rows, options["ROW_TILE"]), groups)
    matmul_kernel[grid](
        x.values, x.scale, matrix.values, matrix.scale, out, num_tokens, *strides, *group_strides,
        ROWS=num_rows, WIDTH=width, HAS_SCALES=has_scales, IMPRECISE=128 if has_scales else 0, **options,
        launch_pdl=True,
    )  # fmt: skip


def linear(x: Tensor | Rows | Panels, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    """x [n, width] bf16 -> [n, rows], the input rounded to e4m3 where the checkpoint expects it.

    x may come in dense parts [n, parts, width / parts], or have been rounded before, in the layout of the matrix.
    out: of float32 results, which are none of a packed matrix.
    """
    if isinstance(matrix.rows, Packed):
        assert not isinstance(x, Rows) and out is None, "packed matrices take panels"
        if isinstance(x, Tensor):
            width = x.shape[1:].numel()
            require(width == matrix.rows.width, f"x is {width} wide; it must be {matrix.rows.width}")
            x = quantise_panels(x, matrix.rows.padded_width)
        return products(x, matrix.rows)
    assert not isinstance(x, Panels), "only packed matrices take panels"
    x = x.flatten(1) if isinstance(x, Tensor) else x
    if not matrix.rounds_input:
        assert isinstance(x, Tensor), "the input of this matrix is not rounded"
        return matmul(Rows(x, None), matrix.rows, matrix.dtype, out)
    x = x if isinstance(x, Rows) else quantise(x)
    return matmul(x if matrix.rows.scale is not None else widened(x), matrix.rows, matrix.dtype, out)


def linear_in_pieces(x: Tensor, matrix: Matrix) -> Tensor:
    """The results of each piece of the width [pieces, n, rows] float32, to be added in this order.

    A matrix of few rows is read by more programs so. How many pieces there are does not depend on the tokens.
    """
    (num_tokens, width), rows = x.shape, matrix.rows
    if matrix.rounds_input or width % (PIECES * PIECE_WIDTH):
        return linear(x, matrix).unsqueeze(0)
    assert isinstance(rows, Rows), "bf16 matrices are not packed"
    num_rows = len(rows.values)
    require(rows.values.shape[1] == width, f"x is {width} wide; it must be {rows.values.shape[1]}")
    out = torch.empty(PIECES, num_tokens, num_rows, device=x.device)
    piece, strides = width // PIECES, (x.stride(0), width, num_rows)
    group_strides, shape = (piece, piece, num_tokens * num_rows), (num_rows, piece, PIECES)
    _launch(Rows(x, None), rows, out, num_tokens, strides, group_strides, shape)
    return out
