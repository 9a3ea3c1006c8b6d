"""Hyper-connections: m residual streams, collapsed before and spread after each half layer.

The mix of a half is a narrow product along m * H. At the released sizes CUDA C++ reads the streams once, for leaving
the half before too (`native/hyper.cu`). In Triton the product is cut into pieces of one fixed size whose sums are added
in order by a second kernel, which also does the Sinkhorn rounds and the collapse. fn is float32; as two bf16 matrices
it keeps 16 bits of its mantissa, and streams are bf16 anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda import native
from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm, rms_norm
from deepinfer.backends.cuda.hopper.numbers import bf16_rounded, multiply, to_bf16
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HyperWeights, NormWeights

PIECE = 1024  # columns that one program sums
TOKEN_TILE = 64
NATIVE = Path(__file__).parent / "native" / "hyper.cu"
NATIVE_SIZES, NATIVE_MIXES = (4, 5120), 24  # the rest as in this source
NATIVE_PARTS, NATIVE_WARPS, NATIVE_SHARED_BYTES, FINISH_THREADS = 40, 6, 110_592, 160
NATIVE_TOKENS, NATIVE_GROUPS = 8 * NATIVE_WARPS, 6  # that a block takes at a time; blocks of a part that an H200 runs


@dataclass(frozen=True)
class Hyper:
    """fn as two bf16 matrices [mixes padded, m * H]; gain and base [(2 + m) * m] float32.

    fn_packed: at the released sizes both once more, in the order in which the matrix unit takes them.
    """

    fn_high: Tensor
    fn_low: Tensor
    fn_packed: Tensor | None
    gain: Tensor
    base: Tensor
    num_streams: int
    num_iterations: int
    eps: float
    norm_eps: float
    norm: Norm


def prepare_hyper(hyper: HyperWeights, norm: NormWeights) -> Hyper:
    """Split fn, spread the gains."""
    fn = hyper.fn.value.float()
    streams = next((m for m in range(1, fn.shape[0]) if (2 + m) * m == fn.shape[0]), 0)
    expect("hyper fn", fn, ((2 + streams) * streams, None))
    expect("hyper base", hyper.base.value, (fn.shape[0],))
    expect("hyper scale", hyper.scale.value, (3,))
    padded = fn.new_zeros(max(16, next_power_of_2(fn.shape[0])), fn.shape[1])
    padded[: fn.shape[0]] = fn
    high = padded.to(torch.bfloat16)
    sizes = torch.tensor([streams, streams, streams * streams], device=fn.device)
    low = (padded - high.float()).to(torch.bfloat16)
    fits = (streams, fn.shape[1] // streams) == NATIVE_SIZES
    gain = hyper.scale.value.float().repeat_interleave(sizes, output_size=len(fn))
    return Hyper(
        high, low, packed_fn(high, low) if fits else None, gain,
        hyper.base.value.float().contiguous(), streams, hyper.num_iterations, hyper.eps, hyper.norm_eps,
        prepare_norm(norm),
    )  # fmt: skip


@triton.jit
def mix_pieces_kernel(
    streams, fn_high, fn_low, sums, num_tokens,
    WIDTH: tl.constexpr, MIXES: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums [pieces, tokens, MIXES] of streams @ fn.T along one piece of the width.

    x is nothing but an operand: Triton 3.6 keeps a buffer too few of a tile that is also read as numbers, and
    overwrites it while the matrix unit still reads.
    """
    piece = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    mix, step = tl.arange(0, MIXES), tl.arange(0, STEP)
    total = tl.zeros([TOKENS, MIXES], tl.float32)
    for start in range(piece * PIECE, piece * PIECE + PIECE, STEP):
        column = start + step
        is_column = column < WIDTH
        here = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(streams + here, mask=is_token[:, None] & is_column[None, :], other=0.0)
        at = mix[None, :] * WIDTH + column[:, None]
        total = multiply(x, tl.load(fn_low + at, mask=is_column[:, None], other=0.0), total, 0)
        total = multiply(x, tl.load(fn_high + at, mask=is_column[:, None], other=0.0), total, 0)
    place = piece * num_tokens + token
    tl.store(sums + place[:, None] * MIXES + mix[None, :], total, mask=is_token[:, None])


@triton.jit
def collapsed(streams, pre, norm, token, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, TILE: tl.constexpr, eps):
    """norm(sum_i pre[i] * stream[i]) of one token, rounded to bf16: [TILE] float32, zero past HIDDEN.

    And the sum of squares of its streams.
    """
    column = tl.arange(0, TILE)
    is_column = column < HIDDEN
    total, squares = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for stream in tl.static_range(STREAMS):
        part = tl.load(streams + (token * STREAMS + stream) * HIDDEN + column, mask=is_column, other=0.0)
        part = part.to(tl.float32)
        total += tl.load(pre + token * STREAMS + stream) * part
        squares += part * part
    weight = tl.load(norm + column, mask=is_column, other=0.0)
    return rms_norm(bf16_rounded(total), weight, HIDDEN, eps), tl.sum(squares)


@triton.jit
def collapse_kernel(streams, pre, norm, eps, out, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, TILE: tl.constexpr):
    """The normed collapse of one token's streams, and nothing else of `hyper_enter`."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    x, _ = collapsed(streams, pre, norm, token, HIDDEN, STREAMS, TILE, eps)
    column = tl.arange(0, TILE)
    tl.store(out + token * HIDDEN + column, to_bf16(x), mask=column < HIDDEN)


@triton.jit
def mixes(sums, scale, gain, base, at, is_here, token, num_tokens, piece, is_piece, MIXES):
    """Finished mixes at the columns `at` of one token; sums of pieces are added along axis 0."""
    place = (piece * num_tokens + token) * MIXES
    parts = tl.load(sums + place[:, None] + at[None, :], mask=is_piece[:, None] & is_here[None, :], other=0.0)
    value = tl.sum(parts, 0) * scale
    gains = tl.load(gain + at, mask=is_here, other=0.0)
    return value * gains + tl.load(base + at, mask=is_here, other=0.0)


@triton.jit
def enter_kernel(
    streams, pre, norm, norm_eps, sums, gain, base, x, new_pre, post, comb, num_tokens, eps, mix_eps,
    HIDDEN: tl.constexpr, STREAMS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, MIXES: tl.constexpr,
    PIECES: tl.constexpr, PIECE_TILE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The rest of `hyper_enter` for one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    value, squares = collapsed(streams, pre, norm, token, HIDDEN, STREAMS, TILE, norm_eps)
    tl.store(x + token * HIDDEN + column, to_bf16(value), mask=column < HIDDEN)

    piece, stream = tl.arange(0, PIECE_TILE), tl.arange(0, PADDED)
    is_piece, is_stream = piece < PIECES, stream < STREAMS
    scale = tl.rsqrt(squares / (STREAMS * HIDDEN) + mix_eps)
    gate = mixes(sums, scale, gain, base, stream, is_stream, token, num_tokens, piece, is_piece, MIXES)
    tl.store(new_pre + token * STREAMS + stream, tl.sigmoid(gate) + eps, mask=is_stream)
    at = STREAMS + stream
    gate = mixes(sums, scale, gain, base, at, is_stream, token, num_tokens, piece, is_piece, MIXES)
    tl.store(post + token * STREAMS + stream, tl.sigmoid(gate) * 2, mask=is_stream)

    pair = tl.arange(0, PADDED * PADDED)
    source, target = pair // PADDED, pair % PADDED
    is_pair = (source < STREAMS) & (target < STREAMS)
    at = (2 + source) * STREAMS + target
    logits = mixes(sums, scale, gain, base, at, is_pair, token, num_tokens, piece, is_piece, MIXES)
    logits = tl.reshape(tl.where(is_pair, logits, -1e30), [PADDED, PADDED])
    is_inside = is_stream[:, None] & is_stream[None, :]
    grown = tl.exp(logits - tl.max(logits, 1)[:, None])
    grown = tl.where(is_inside, grown, 0.0)
    mixed = tl.where(is_inside, grown / tl.where(is_stream, tl.sum(grown, 1), 1.0)[:, None] + eps, 0.0)
    mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
    for _ in range(ROUNDS - 1):
        mixed = mixed / (tl.sum(mixed, 1) + eps)[:, None]
        mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
    place = comb + token * STREAMS * STREAMS + stream[:, None] * STREAMS + stream[None, :]
    tl.store(place, mixed, mask=is_inside)


def packed_fn(high: Tensor, low: Tensor) -> Tensor:
    """Fragments of fn as `native/hyper.cu` says: [H / 32, m, 2 halves of 16 columns, 3 tiles, 32 lanes, 8] bf16."""
    streams, hidden = NATIVE_SIZES
    both = torch.cat([high[:NATIVE_MIXES], low[:NATIVE_MIXES]]).view(6, 8, streams, hidden // 32, 4, 2, 2, 2)
    tiles = torch.stack([both[0], both[1], both[3], both[4], both[2], both[5]]).unflatten(0, (3, 2))
    fragments: Tensor = tiles.permute(4, 3, 6, 0, 2, 5, 7, 1, 8)
    return fragments.contiguous()


def _native(name: str, device: torch.device, threads: int, shared_bytes: int) -> native.Kernel | None:
    return native.load(NATIVE, name, threads, shared_bytes, device.index or 0)


def _enter_native(streams: Tensor, pre: Tensor, hyper: Hyper, x: Tensor, mix: Mix, *left: Tensor) -> bool:
    """`hyper_enter` into x and mix by the CUDA C++ kernels; False where Triton's must do.

    left: of a half to leave first its output, post and comb, and where its streams go.
    """
    num_tokens, device = len(pre), streams.device
    if device.type != "cuda" or hyper.fn_packed is None or any(part.data_ptr() % 16 for part in (streams, pre, *left)):
        return False
    first = _native("leave_and_enter" if left else "enter", device, NATIVE_WARPS * 32, NATIVE_SHARED_BYTES)
    second = _native("finish", device, FINISH_THREADS, 0)
    if first is None or second is None:
        return False
    sums = torch.empty(num_tokens, NATIVE_PARTS, NATIVE_MIXES + 1, device=device)
    weights = hyper.fn_packed, hyper.gain, hyper.base, hyper.norm.weight
    numbers = num_tokens, hyper.num_iterations, hyper.eps, hyper.norm_eps, hyper.norm.eps
    given = streams, pre, *(left or (None,) * 4), *weights, sums, x, mix.pre, mix.post, mix.comb, *numbers
    first.launch((NATIVE_PARTS, min(NATIVE_GROUPS, cdiv(num_tokens, NATIVE_TOKENS)), 1), given)
    second.launch((num_tokens, 1, 1), given)
    return True


def _entered(num_tokens: int, hyper: Hyper, device: torch.device) -> tuple[Tensor, Mix]:
    """What `hyper_enter` gives, not filled."""
    m, x = hyper.num_streams, torch.empty(num_tokens, len(hyper.norm.weight), dtype=torch.bfloat16, device=device)
    return x, Mix(*(torch.empty(num_tokens, *shape, device=device) for shape in ((m,), (m,), (m, m))))


def hyper_enter(streams: Tensor, pre: Tensor, hyper: Hyper) -> tuple[Tensor, Mix]:
    """Input of a half layer [T, H] bf16, and the mix of this half from streams [T, m, H] bf16."""
    m, (num_mixes, width), hidden = hyper.num_streams, hyper.fn_high.shape, len(hyper.norm.weight)
    expect("streams", streams, (None, m, hidden), torch.bfloat16)
    num_tokens, device = streams.shape[0], streams.device
    expect("pre", pre, (num_tokens, m), torch.float32)
    streams, pre = streams.contiguous(), pre.contiguous()
    x, mix = _entered(num_tokens, hyper, device)
    if not num_tokens or _enter_native(streams, pre, hyper, x, mix):
        return x, mix
    num_pieces = cdiv(width, PIECE)
    sums = torch.empty(num_pieces, num_tokens, num_mixes, device=device)
    mix_pieces_kernel[(cdiv(num_tokens, TOKEN_TILE), num_pieces)](
        streams, hyper.fn_high, hyper.fn_low, sums, num_tokens,
        width, num_mixes, PIECE, TOKEN_TILE, 128, num_warps=4, num_stages=3,
    )  # fmt: skip
    enter_kernel[(num_tokens,)](
        streams, pre, hyper.norm.weight, hyper.norm.eps, sums, hyper.gain, hyper.base,
        x, mix.pre, mix.post, mix.comb, num_tokens, hyper.eps, hyper.norm_eps,
        hidden, m, next_power_of_2(m), next_power_of_2(hidden), num_mixes,
        num_pieces, next_power_of_2(num_pieces), hyper.num_iterations, num_warps=8,
    )  # fmt: skip
    return x, mix


@triton.jit
def leave_kernel(
    streams, output, post, comb, out,
    HIDDEN: tl.constexpr, STREAMS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some columns of all streams of one token."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    target, is_column = tl.arange(0, PADDED), column < HIDDEN
    is_target = target < STREAMS
    y = tl.load(output + token * HIDDEN + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.load(post + token * STREAMS + target, mask=is_target, other=0.0)[:, None] * y[None, :]
    for source in tl.static_range(STREAMS):
        share = tl.load(comb + (token * STREAMS + source) * STREAMS + target, mask=is_target, other=0.0)
        part = tl.load(streams + (token * STREAMS + source) * HIDDEN + column, mask=is_column, other=0.0)
        total += share[:, None] * part.to(tl.float32)[None, :]
    at = out + (token * STREAMS + target)[:, None] * HIDDEN + column[None, :]
    tl.store(at, to_bf16(total), mask=is_target[:, None] & is_column[None, :])


def hyper_leave(streams: Tensor, output: Tensor, mix: Mix) -> Tensor:
    """new[j] = post[j] * output + sum_i comb[i, j] * streams[i]: [T, m, H] bf16."""
    expect("streams", streams, (None, None, None), torch.bfloat16)
    num_tokens, m, hidden = streams.shape
    expect("output", output, (num_tokens, hidden), torch.bfloat16)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    tile = min(1024, next_power_of_2(hidden))
    if num_tokens:
        leave_kernel[(num_tokens, cdiv(hidden, tile))](
            streams.contiguous(), output.contiguous(), mix.post.contiguous(), mix.comb.contiguous(), out,
            hidden, m, next_power_of_2(m), tile, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out


def hyper_next(streams: Tensor, output: Tensor, mix: Mix, hyper: Hyper) -> tuple[Tensor, Tensor, Mix]:
    """`hyper_leave`, then `hyper_enter` of the next half, in the same bits: streams, its input [T, H] bf16, its mix."""
    m, hidden = hyper.num_streams, len(hyper.norm.weight)
    expect("streams", streams, (None, m, hidden), torch.bfloat16)
    num_tokens = len(streams)
    expect("output", output, (num_tokens, hidden), torch.bfloat16)
    expect("pre", mix.pre, (num_tokens, m), torch.float32)
    left = torch.empty_like(streams, memory_format=torch.contiguous_format)
    x, own = _entered(num_tokens, hyper, streams.device)
    half = output.contiguous(), mix.post.contiguous(), mix.comb.contiguous(), left
    if num_tokens and _enter_native(streams.contiguous(), mix.pre.contiguous(), hyper, x, own, *half):
        return left, x, own
    left = hyper_leave(streams, output, mix)
    return left, *hyper_enter(left, mix.pre, hyper)
