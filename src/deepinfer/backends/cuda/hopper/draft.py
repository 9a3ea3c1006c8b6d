"""The draft head around its blocks: what it reads of the streams, and what the token before a draft adds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.embedding import Head
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, normed, prepare_norm
from deepinfer.backends.cuda.hopper.numbers import multiply, to_bf16
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import DraftWeights

COLUMN_TILE = 1024
ID_TILE = 128


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
    """Pack the weights; the output matrix is the one that `head` holds."""
    plain = [weight.value.contiguous() for weight in (draft.markov_embed, draft.markov_head, draft.confidence)]
    for name, value in zip(("markov embed", "markov head", "confidence"), plain, strict=True):
        expect(name, value, (None, None), torch.bfloat16)
    return Draft(
        prepare_matrix(draft.main_proj), prepare_norm(draft.main_norm),
        dataclasses.replace(head, norm=prepare_norm(draft.norm)), *plain,
    )  # fmt: skip


@triton.jit
def streams_kernel(
    streams, pre, out, HIDDEN: tl.constexpr, STREAMS: tl.constexpr, HAS_PRE: tl.constexpr, TILE: tl.constexpr
):
    """Columns of one token: the sum of its streams by their weights, or their mean."""
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
            streams, streams if pre is None else pre.contiguous(), out, hidden, m, pre is not None, tile, num_warps=4
        )
    return out


def tap(streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H] bf16: [T, H] bf16."""
    return _collapse(streams, None)


def draft_main(taps: Tensor, draft: Draft) -> Tensor:
    """Main vectors [T, H] bf16 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None))
    return normed(linear(taps.flatten(1).to(torch.bfloat16), draft.main_proj), draft.main_norm)


def draft_head(streams: Tensor, pre: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """x [T, H] bf16 and logits [T, V] float32 of streams [T, m, H] bf16 collapsed with pre [T, m] float32."""
    expect("pre", pre, tuple(streams.shape[:2]), torch.float32)
    x = _collapse(streams, pre)
    return x, linear(normed(x, draft.head.norm), draft.head.matrix)


@triton.jit
def markov_kernel(
    logits, embed, previous, matrix, out, num_tokens, num_ids, logits_stride,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr, ID_TILE: tl.constexpr,
):  # fmt: skip
    """A tile of logits [tokens, ids] + embed[previous] [tokens, RANK] @ matrix [ids, RANK].T."""
    token = tl.program_id(0) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    ids, rank = tl.program_id(1) * ID_TILE + tl.arange(0, ID_TILE), tl.arange(0, RANK_TILE)
    is_token, is_id, is_rank = token < num_tokens, ids < num_ids, rank < RANK
    before = tl.load(previous + token, mask=is_token, other=0)
    right = tl.load(embed + before[None, :] * RANK + rank[:, None], mask=is_rank[:, None], other=0.0)
    at = matrix + ids.to(tl.int64)[:, None] * RANK + rank[None, :]
    left = tl.load(at, mask=is_id[:, None] & is_rank[None, :], other=0.0)
    added = tl.trans(multiply(left, right, tl.zeros([ID_TILE, TOKEN_TILE], tl.float32), 0))
    is_here, line = is_token[:, None] & is_id[None, :], token.to(tl.int64)[:, None]
    value = tl.load(logits + line * logits_stride + ids[None, :], mask=is_here, other=0.0)
    tl.store(out + line * num_ids + ids[None, :], value + added, mask=is_here)


@triton.jit
def confidence_kernel(
    x, embed, previous, weight, out, x_stride,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """weight . [x, embed[previous]] of one token."""
    token = tl.program_id(0).to(tl.int64)
    column, rank = tl.arange(0, TILE), tl.arange(0, RANK_TILE)
    is_here, is_rank = column < HIDDEN, rank < RANK
    value = tl.load(x + token * x_stride + column, mask=is_here, other=0.0).to(tl.float32)
    total = tl.sum(value * tl.load(weight + column, mask=is_here, other=0.0).to(tl.float32))
    value = tl.load(embed + tl.load(previous + token) * RANK + rank, mask=is_rank, other=0.0).to(tl.float32)
    total += tl.sum(value * tl.load(weight + HIDDEN + rank, mask=is_rank, other=0.0).to(tl.float32))
    tl.store(out + token, total)


def draft_next(logits: Tensor, x: Tensor, previous: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n] float32."""
    (num_ids, rank), num_tokens, hidden = draft.markov_head.shape, len(previous), x.shape[1]
    expect("logits", logits, (num_tokens, num_ids), torch.float32)
    expect("x", x, (num_tokens, draft.confidence.shape[1] - rank), torch.bfloat16)
    expect("previous", previous, (None,), torch.int64)
    previous = previous.contiguous()
    out = torch.empty(num_tokens, num_ids, device=logits.device)
    confidence = torch.empty(num_tokens, device=logits.device)
    if not num_tokens:
        return out, confidence
    token_tile, rank_tile = (16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64), next_power_of_2(rank)
    markov_kernel[(cdiv(num_tokens, token_tile), cdiv(num_ids, ID_TILE))](
        logits, draft.markov_embed, previous, draft.markov_head, out, num_tokens, num_ids, logits.stride(0),
        rank, max(16, rank_tile), token_tile, ID_TILE, num_warps=4,
    )  # fmt: skip
    confidence_kernel[(num_tokens,)](
        x, draft.markov_embed, previous, draft.confidence, confidence, x.stride(0),
        hidden, next_power_of_2(hidden), rank, rank_tile, num_warps=4,
    )  # fmt: skip
    return out, confidence
