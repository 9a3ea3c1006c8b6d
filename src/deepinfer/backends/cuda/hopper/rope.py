"""Rotary embedding inside kernels, and of the last columns of queries where they lie."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import bf16_rounded, cosine, sine, to_bf16
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2


@triton.jit
def rotated(first, second, angle):
    """Pairs rotated by `angle`, rounded to bf16 (as float32)."""
    cos, sin = cosine(angle), sine(angle)
    return bf16_rounded(first * cos - second * sin), bf16_rounded(second * cos + first * sin)


@triton.jit
def tail_angles(position, frequencies, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr):
    """By what `position` turns each of the PAIRS that WIDTH columns are: zero but for the last ROPE columns."""
    pair = tl.arange(0, PAIRS) - (WIDTH - ROPE) // 2
    is_turned = (pair >= 0) & (pair < ROPE // 2)
    return position.to(tl.float32) * tl.load(frequencies + pair, mask=is_turned, other=0.0)


@triton.jit
def rotated_tail(x, position, frequencies, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr):
    """x [PAIRS, 2] float32 with its last ROPE of WIDTH columns rotated by `position`, rounded to bf16."""
    first, second = tl.split(x)
    return tl.join(*rotated(first, second, tail_angles(position, frequencies, WIDTH, ROPE, PAIRS)))


@triton.jit
def rotate_heads_kernel(
    x, positions, frequencies, direction,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, HEAD_TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """All heads of one token; direction: 1.0, or -1.0 for backwards."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEAD_TILE), tl.arange(0, PAIRS)
    column = tl.arange(0, 2 * PAIRS)
    is_here = (head < HEADS)[:, None] & (column < ROPE)[None, :]
    at = x + (token * HEADS + head)[:, None] * WIDTH + (WIDTH - ROPE) + column[None, :]
    first, second = tl.split(tl.reshape(tl.load(at, mask=is_here, other=0.0), [HEAD_TILE, PAIRS, 2]))
    frequency = tl.load(frequencies + pair, mask=pair < ROPE // 2, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency * direction
    first, second = rotated(first.to(tl.float32), second.to(tl.float32), angle[None, :])
    tl.store(at, to_bf16(tl.reshape(tl.join(first, second), [HEAD_TILE, 2 * PAIRS])), mask=is_here)


def rotate_heads(x: Tensor, positions: Tensor, frequencies: Tensor, *, backwards: bool = False) -> None:
    """Rotate the last columns of x [T, heads, D] bf16, contiguous, in place."""
    num_tokens, heads, width = x.shape
    rope = 2 * len(frequencies)
    if num_tokens and rope:
        rotate_heads_kernel[(num_tokens,)](
            x, positions, frequencies, -1.0 if backwards else 1.0, heads, width, rope,
            next_power_of_2(heads), next_power_of_2(rope // 2), num_warps=4, launch_pdl=True,
        )  # fmt: skip
