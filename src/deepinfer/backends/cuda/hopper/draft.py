"""The draft head around its blocks: what it reads of the streams, and what the token before a draft adds.

Its output matrix is the backbone's, rounded to e4m3: answers do not rest on it, since drafts are checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.embedding import Head
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix, rounded
from deepinfer.backends.cuda.hopper.norm import Norm, normed, prepare_norm
from deepinfer.backends.cuda.hopper.numbers import multiply, to_bf16
from deepinfer.backends.cuda.hopper.sample import Parts, best_of_parts, dense_rows, peak_of
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import DraftWeights

COLUMN_TILE = 1024
ID_TILE, NEXT_WARPS, PEAK_WARPS = 128, 8, 4


@dataclass(frozen=True)
class Draft:
    """Projections of the draft head; markov_embed and markov_head [V, rank], confidence [1, H + rank], all bf16."""

    main_proj: Matrix
    main_norm: Norm
    head: Head
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


def prepare_draft(draft: DraftWeights, head: Head) -> Draft:
    """Pack the weights; the output matrix is the one that `head` holds, rounded."""
    plain = [weight.value.contiguous() for weight in (draft.markov_embed, draft.markov_head, draft.confidence)]
    expect("markov embed", plain[0], (None, None), torch.bfloat16)
    num_ids, rank = plain[0].shape
    expect("markov head", plain[1], (num_ids, rank), torch.bfloat16)
    expect("confidence", plain[2], (1, len(head.norm.weight) + rank), torch.bfloat16)
    return Draft(
        prepare_matrix(draft.main_proj), prepare_norm(draft.main_norm),
        Head(prepare_norm(draft.norm), rounded(head.matrix)), *plain,
    )  # fmt: skip


@triton.jit
def streams_kernel(
    streams, pre, out, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, HAS_PRE: tl.constexpr, TILE: tl.constexpr
):
    """Columns of one token: the sum of its streams by their weights, or their mean."""
    begin()
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_here, total = column < HIDDEN, tl.zeros([TILE], tl.float32)
    for stream in tl.static_range(STREAMS):
        at = token * STREAMS + stream
        part = tl.load(streams + at * HIDDEN + column, mask=is_here, other=0.0).to(tl.float32)
        if HAS_PRE:
            part *= tl.load(pre + at)
        total += part
    if not HAS_PRE:
        total = total / STREAMS
    tl.store(out + token * HIDDEN + column, to_bf16(total), mask=is_here)


def _collapse(streams: Tensor, pre: Tensor | None) -> Tensor:
    """Streams [T, m, H] bf16 by their weights pre [T, m] float32, None = their mean: [T, H] bf16."""
    expect("streams", streams, (None, None, None), torch.bfloat16)
    num_tokens, m, hidden = streams.shape
    streams = streams.contiguous()
    out = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=streams.device)
    if num_tokens:
        tile = min(COLUMN_TILE, next_power_of_2(hidden))
        streams_kernel[(num_tokens, cdiv(hidden, tile))](
            streams, streams if pre is None else pre.contiguous(), out,
            hidden, m, pre is not None, tile, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out


def tap(streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H] bf16: [T, H] bf16."""
    return _collapse(streams, None)


def draft_main(taps: Tensor, draft: Draft) -> Tensor:
    """Main vectors [T, H] bf16 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None))
    return normed(linear(taps.flatten(1).to(torch.bfloat16), draft.main_proj), draft.main_norm)


def draft_head(streams: Tensor, pre: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """x [T, H] bf16 and logits [T, V] bf16 of streams [T, m, H] bf16 collapsed with pre [T, m] float32."""
    expect("pre", pre, tuple(streams.shape[:2]), torch.float32)
    x = _collapse(streams, pre)
    return x, linear(normed(x, draft.head.norm), draft.head.matrix)


@triton.jit
def next_logits(
    logits, embed, previous, matrix, num_tokens, num_ids, logits_stride,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, ID_TILE: tl.constexpr,
):  # fmt: skip
    """The tokens and ids of a tile, and its logits + embed[previous] [tokens, RANK] @ matrix [ids, RANK].T.

    They are -inf where no id is. A token before that is no id adds nothing, as one outside the table of `embed_kernel`
    is zero.
    """
    token = tl.program_id(0) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    ids = tl.program_id(1) * ID_TILE + tl.arange(0, ID_TILE)
    rank, is_token, is_id = tl.arange(0, RANK_TILE), token < num_tokens, ids < num_ids
    is_rank, at = rank < RANK, logits + token.to(tl.int64)[:, None] * logits_stride + ids[None, :]
    value = tl.load(at, mask=is_token[:, None] & is_id[None, :], other=float("-inf")).to(tl.float32)
    before = tl.load(previous + token, mask=is_token, other=0)
    is_known = (before >= 0) & (before < num_ids)
    at = embed + before[None, :] * RANK + rank[:, None]
    right = tl.load(at, mask=is_known[None, :] & is_rank[:, None], other=0.0)
    at = matrix + ids.to(tl.int64)[:, None] * RANK + rank[None, :]
    left = tl.load(at, mask=is_id[:, None] & is_rank[None, :], other=0.0)
    return token, ids, value + tl.trans(multiply(left, right, tl.zeros([ID_TILE, TOKEN_TILE], tl.float32), 0))


@triton.jit
def next_kernel(
    logits, embed, previous, matrix, out, num_tokens, num_ids, logits_stride,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, ID_TILE: tl.constexpr,
):  # fmt: skip
    """One tile of these logits."""
    begin()
    token, ids, value = next_logits(
        logits, embed, previous, matrix, num_tokens, num_ids, logits_stride, RANK, RANK_TILE, TOKEN_TILE, ID_TILE
    )  # fmt: skip
    at = out + token.to(tl.int64)[:, None] * num_ids + ids[None, :]
    tl.store(at, value, mask=(token < num_tokens)[:, None] & (ids < num_ids)[None, :])


@triton.jit
def next_peak_kernel(
    logits, embed, previous, matrix, peaks, peak_ids, sums, num_tokens, num_ids, logits_stride,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, ID_TILE: tl.constexpr,
):  # fmt: skip
    """The same, of which only what `best_of_parts` reads is kept, a tile being a part."""
    begin()
    token, ids, value = next_logits(
        logits, embed, previous, matrix, num_tokens, num_ids, logits_stride, RANK, RANK_TILE, TOKEN_TILE, ID_TILE
    )  # fmt: skip
    is_id = (ids < num_ids)[None, :].broadcast_to([TOKEN_TILE, ID_TILE])
    peak, place, total = peak_of(value, tl.broadcast_to(ids[None, :], [TOKEN_TILE, ID_TILE]), is_id, num_ids, 1)
    at, is_token = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), token < num_tokens
    tl.store(peaks + at, peak, mask=is_token)
    tl.store(peak_ids + at, place, mask=is_token)
    tl.store(sums + at, total, mask=is_token)


@triton.jit
def confidence_kernel(
    x, embed, previous, weight, out, x_stride, num_ids,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """weight . [x, embed[previous]] of one token."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column, rank = tl.arange(0, TILE), tl.arange(0, RANK_TILE)
    is_here, is_rank = column < HIDDEN, rank < RANK
    value = tl.load(x + token * x_stride + column, mask=is_here, other=0.0).to(tl.float32)
    total = tl.sum(value * tl.load(weight + column, mask=is_here, other=0.0).to(tl.float32))
    before = tl.load(previous + token)
    is_known = (before >= 0) & (before < num_ids)
    value = tl.load(embed + before * RANK + rank, mask=is_rank & is_known, other=0.0).to(tl.float32)
    total += tl.sum(value * tl.load(weight + HIDDEN + rank, mask=is_rank, other=0.0).to(tl.float32))
    tl.store(out + token, total)


def draft_next(logits: Tensor, x: Tensor, previous: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n] float32."""
    confidence, grid, rows, tiles = _confidence(x, previous, draft), *_tiles(logits, previous, draft)
    out = torch.empty(logits.shape, device=logits.device)
    if len(logits):
        next_kernel[grid](*rows, out, *tiles, num_warps=NEXT_WARPS, launch_pdl=True)
    return out, confidence


def draft_likeliest(logits: Tensor, x: Tensor, previous: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens [n] int64 of such logits, their log-probabilities and the raw confidences [n] float32."""
    confidence, grid, rows, tiles = _confidence(x, previous, draft), *_tiles(logits, previous, draft)
    parts = Parts.empty(len(logits), cdiv(logits.shape[1], ID_TILE), logits.shape[1], logits.device)
    if len(logits):
        next_peak_kernel[grid](*rows, parts.peaks, parts.ids, parts.sums, *tiles, num_warps=PEAK_WARPS, launch_pdl=True)
    token_ids, _, logprobs = best_of_parts(parts)
    return token_ids, logprobs, confidence


def _tiles(
    logits: Tensor, previous: Tensor, draft: Draft
) -> tuple[tuple[int, int], tuple[Tensor, ...], tuple[int, ...]]:
    """The grid of such a kernel, and its arguments before the results and after them."""
    (num_ids, rank), num_tokens = draft.markov_head.shape, len(previous)
    expect("logits", logits, (num_tokens, num_ids))
    expect("previous", previous, (None,), torch.int64)
    logits = dense_rows(logits)
    token_tile = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    grid = cdiv(num_tokens, token_tile), cdiv(num_ids, ID_TILE)
    sizes = num_tokens, num_ids, logits.stride(0), rank, max(16, next_power_of_2(rank)), token_tile, ID_TILE
    return grid, (logits, draft.markov_embed, previous.contiguous(), draft.markov_head), sizes


def _confidence(x: Tensor, previous: Tensor, draft: Draft) -> Tensor:
    """weight . [x, markov_embed(previous)] of each row [n] float32."""
    (num_ids, rank), num_tokens = draft.markov_embed.shape, len(previous)
    hidden = draft.confidence.shape[1] - rank
    expect("x", x, (num_tokens, hidden), torch.bfloat16)
    x = dense_rows(x)
    confidence = torch.empty(num_tokens, device=x.device)
    if num_tokens:
        confidence_kernel[(num_tokens,)](
            x, draft.markov_embed, previous.contiguous(), draft.confidence, confidence, x.stride(0), num_ids,
            hidden, next_power_of_2(hidden), rank, next_power_of_2(rank), num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return confidence
