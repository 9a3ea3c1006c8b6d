"""The indexer: index queries, and the compressed entries that each token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.compressor import packed_index
from deepinfer.backends.cuda.hopper.index_scores import TOKEN_TILE, candidate_scores, entry_scores
from deepinfer.backends.cuda.hopper.linear import linear, linear_in_pieces
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.numbers import e2m1_numbers, e4m3_bytes, power, ue8m0
from deepinfer.backends.cuda.hopper.rope import rotated, tail_angles
from deepinfer.backends.cuda.hopper.selection import GROUP, best_columns, best_of_blocks, group_peaks
from deepinfer.backends.cuda.hopper.sizes import cdiv
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Selection
from deepinfer.ops.weights import IndexerWeights

SCORE_BYTES = 1 << 30  # of scores that are held at a time
HEAD_TILE = 8  # heads whose queries one program makes
UP = tl.constexpr(-1)  # octaves that e2m1 of the largest scale grow by as e4m3


@dataclass(frozen=True)
class Indexer:
    """Index-query weights of one index source."""

    wq_b: Matrix
    weights_proj: Matrix
    frequencies: Tensor
    num_heads: int
    dim: int
    top_k: int
    ratio: int
    keeps_candidates: bool
    candidate_blocks: int
    candidate_size: int


def prepare_indexer(indexer: IndexerWeights) -> Indexer:
    """Pack the weights. Raises ShapeError where candidates could hold fewer entries than are picked."""
    rows, heads = indexer.wq_b.value.shape[0], indexer.num_heads
    require(rows % heads == 0, f"index wq_b has {rows} rows; it must be a multiple of its {heads} heads")
    dim = rows // heads
    require(dim in (32, 64, 128, 256), f"the index dimension is {dim}; it must be 32, 64, 128 or 256")
    require(
        indexer.candidate_blocks * indexer.candidate_size >= indexer.top_k + indexer.candidate_size,
        f"{indexer.candidate_blocks} candidate blocks of {indexer.candidate_size} entries must hold a block more than "
        f"the {indexer.top_k} entries that are picked",
    )
    return Indexer(
        wq_b=prepare_matrix(indexer.wq_b),
        weights_proj=prepare_matrix(indexer.weights_proj, dtype=torch.float32),
        frequencies=rope_frequencies(indexer.rope, indexer.wq_b.value.device),
        num_heads=heads,
        dim=dim,
        top_k=indexer.top_k,
        ratio=indexer.ratio,
        keeps_candidates=indexer.keeps_candidates,
        candidate_blocks=indexer.candidate_blocks,
        candidate_size=indexer.candidate_size,
    )


@triton.jit
def query_kernel(
    q, codes, pieces, weights, factor, positions, frequencies, piece_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: rotate, round to e2m1 with a scale per 32; put each on its largest scale, as e4m3.

    Its weight, the sum of the pieces, is multiplied by the factor and that scale. Codes more than 7 octaves below the
    largest scale lose bits.
    """
    begin()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_head = head < HEADS
    line = token * HEADS + head
    at = line[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(q + at, mask=is_head[:, None], other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(value, [TILE, WIDTH // 2, 2]))
    angle = tail_angles(tl.load(positions + token), frequencies, WIDTH, ROPE, WIDTH // 2)
    turned = rotated(first, second, angle[None, :])
    groups: tl.constexpr = TILE * WIDTH // 32
    packed, exponents = packed_index(tl.reshape(tl.join(*turned), [groups, 32]), groups)
    exponents = tl.reshape(exponents.to(tl.int32), [TILE, WIDTH // 32])
    largest = tl.max(exponents, 1)
    down = tl.reshape(power(tl.maximum(exponents - largest[:, None] + (127 + UP), 1)), [groups])
    value = e4m3_bytes(e2m1_numbers(packed) * down[:, None, None])
    tl.store(codes + at, tl.reshape(value, [TILE, WIDTH]), mask=is_head[:, None])
    weight = tl.load(pieces + line, mask=is_head, other=0.0)
    for piece in tl.static_range(1, PIECES):
        weight += tl.load(pieces + piece * piece_stride + line, mask=is_head, other=0.0)
    tl.store(weights + line, weight * factor * ue8m0(largest), mask=is_head)


def select(
    x: Tensor,
    low_rank: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    candidates: Tensor | None,
) -> Selection:
    """The best entries of each token, ascending: n = min(top_k, entries that any token can see) columns."""
    num_tokens, num_entries = batch.num_tokens, (batch.max_position + 1) // indexer.ratio
    expect("x", x, (num_tokens, None), torch.bfloat16)
    expect("low-rank query", low_rank, (num_tokens, None), torch.bfloat16)
    expect("index pages", index_pages, (None, batch.block_tokens // indexer.ratio, indexer.dim // 32 * 17), torch.uint8)
    if candidates is not None:
        expect("candidates", candidates, (num_tokens, None), torch.int32)
    num_blocks = cdiv(num_entries, indexer.candidate_size) if indexer.keeps_candidates else 0
    visible = cast(
        Tensor, batch.once(("visible entries", indexer.ratio), lambda: (batch.positions + 1) // indexer.ratio)
    )
    if num_entries <= indexer.top_k and num_blocks <= indexer.candidate_blocks:
        return _everything(visible.unsqueeze(1), num_entries, num_blocks, indexer, candidates)
    q, weights = _queries(x, low_rank, batch, indexer)
    width = (
        num_entries if candidates is None or indexer.keeps_candidates else candidates.shape[1] * indexer.candidate_size
    )
    step = max(1, SCORE_BYTES // (4 * width) // TOKEN_TILE) * TOKEN_TILE
    parts = [
        _select_part(q, weights, batch, indexer, index_pages, candidates, visible, range(first, first + step))
        for first in range(0, num_tokens, step)
    ]
    if len(parts) == 1:
        return parts[0]
    kept = [part.candidates for part in parts if part.candidates is not None]
    return Selection(torch.cat([part.entries for part in parts]), torch.cat(kept) if kept else None)


def _everything(
    visible: Tensor, num_entries: int, num_blocks: int, indexer: Indexer, candidates: Tensor | None
) -> Selection:
    """The selection when top_k and candidate blocks leave nothing out: no score matters."""
    entry = torch.arange(num_entries, dtype=visible.dtype, device=visible.device)
    entries = torch.where(entry < visible, entry, -1)
    if not indexer.keeps_candidates:
        return Selection(entries, candidates)
    block = torch.arange(num_blocks, dtype=visible.dtype, device=visible.device)
    return Selection(entries, torch.where(block * indexer.candidate_size < visible, block, -1))


def _queries(x: Tensor, low_rank: Tensor, batch: TokenBatch, indexer: Indexer) -> tuple[Tensor, Tensor]:
    """Rotated and e2m1-rounded index queries [T, heads * d] e4m3, head weights [T, heads] float32 with their scales."""
    q, pieces = linear(low_rank, indexer.wq_b), linear_in_pieces(x, indexer.weights_proj)
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    heads, dim = indexer.num_heads, indexer.dim
    weights = torch.empty(len(q), heads, device=q.device)
    if len(q):
        query_kernel[(len(q), cdiv(heads, HEAD_TILE))](
            q, codes, pieces, weights, dim**-0.5 * heads**-0.5 * 2.0**-UP.value, batch.positions, indexer.frequencies,
            pieces.stride(0), heads, dim, 2 * len(indexer.frequencies), len(pieces), HEAD_TILE,
            num_warps=4, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip
    return codes, weights


def _select_part(
    q: Tensor,
    weights: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    candidates: Tensor | None,
    visible: Tensor,
    tokens: range,
) -> Selection:
    """The selection of some of the batch's tokens, so that their scores fit."""
    first, last = tokens.start, min(tokens.stop, batch.num_tokens)
    num_entries, seen, size = (batch.max_position + 1) // indexer.ratio, visible[first:last], indexer.candidate_size
    count = min(indexer.top_k, num_entries)
    if candidates is not None and not indexer.keeps_candidates:
        blocks = candidates[first:last].contiguous()
        scores = candidate_scores(q, weights, batch, indexer, index_pages, blocks, visible, first)
        return Selection(best_of_blocks(scores, seen, count, blocks, size), blocks)
    scores, peaks = entry_scores(q, weights, batch, indexer, index_pages, visible, first, last)
    entries = best_columns(scores, seen, count, peaks=peaks)
    if not indexer.keeps_candidates:
        return Selection(entries, candidates)
    if size != GROUP:
        peaks = group_peaks(scores, seen, size)
    kept = best_columns(peaks, seen, min(indexer.candidate_blocks, peaks.shape[1]), unit=size, is_pinned=True)
    return Selection(entries, kept)
