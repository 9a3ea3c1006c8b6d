"""A kernel that Triton 3.6 compiles wrongly, and the same work in a form that it does not; see `test_buffers.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def flawed_kernel(x, y, out, squares, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """A tile of x is operand of a product and is also read as numbers."""
    row, step = tl.arange(0, 64), tl.arange(0, STEP)
    total, square = tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for start in range(0, WIDTH, STEP):
        tile = tl.load(x + row[:, None] * WIDTH + (start + step)[None, :])
        total = tl.dot(tile, tl.load(y + row[None, :] * WIDTH + (start + step)[:, None]), total)
        square += tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1)
    tl.store(out + row[:, None] * 64 + row[None, :], total)
    tl.store(squares + row, square)


@triton.jit
def sound_kernel(x, y, out, WIDTH: tl.constexpr, STEP: tl.constexpr):
    row, step = tl.arange(0, 64), tl.arange(0, STEP)
    total = tl.zeros([64, 64], tl.float32)
    for start in range(0, WIDTH, STEP):
        tile = tl.load(x + row[:, None] * WIDTH + (start + step)[None, :])
        total = tl.dot(tile, tl.load(y + row[None, :] * WIDTH + (start + step)[:, None]), total)
    tl.store(out + row[:, None] * 64 + row[None, :], total)


def launch() -> None:
    """Both, at one size."""
    x, out = (torch.empty(64, 1024, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    flawed_kernel[(1,)](x, x, out, out, 1024, 64, num_warps=4, num_stages=3)
    sound_kernel[(1,)](x, x, out, 1024, 64, num_warps=4, num_stages=3)
