"""The indexer: scores of packed keys, and the compressed entries that each token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.compressor import packed_index
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.numbers import e2m1_numbers, group_bytes, multiply, scaled_e2m1, to_bf16, ue8m0
from deepinfer.backends.cuda.hopper.quant import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.rope import rotated_tail
from deepinfer.backends.cuda.hopper.selection import best_columns
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Selection
from deepinfer.ops.weights import IndexerWeights

TOKEN_TILE = 4  # tokens of one row that are scored together
KEY_TILE = 64
KEY_TILES = 16  # that one program scores
CANDIDATE_TILE, CANDIDATE_TILES = 128, 8  # the same where entries are gathered
SCORE_BYTES = 1 << 30  # of scores that are held at a time


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
        weights_proj=prepare_matrix(indexer.weights_proj),
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
    q, positions, frequencies, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr
):
    """One head of one token: rotate, round to e2m1 with a scale per 32, in place."""
    token = tl.program_id(0).to(tl.int64)
    at = q + (token * HEADS + tl.program_id(1)) * WIDTH
    column = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)[None, :]
    value = tl.load(at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = rotated_tail(value, tl.load(positions + token), frequencies, WIDTH, ROPE, PAIRS)
    codes, exponents = packed_index(tl.reshape(value, [PAIRS // 16, 32]), PAIRS // 16)
    value = e2m1_numbers(codes) * ue8m0(exponents)[:, None, None]
    tl.store(at + column, to_bf16(tl.reshape(value, [PAIRS, 2])), mask=column < WIDTH)


@triton.jit
def keys_of(
    pages, table, entry, is_seen, page_stride, num_blocks, per_block, table_columns,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Index keys [KEYS, WIDTH] bf16 of one row's entries."""
    column = entry // per_block
    block = tl.load(table + column, mask=is_seen & (column < table_columns), other=0)
    is_seen &= (block >= 0) & (block < num_blocks)
    row_at = pages + block.to(tl.int64) * page_stride + (entry % per_block).to(tl.int64) * (WIDTH // 32 * 17)
    return widened_keys(row_at, is_seen, WIDTH, KEYS)


@triton.jit
def neighbours_of(
    pages, table, start, limit, page_stride, num_blocks, PER_BLOCK: tl.constexpr, table_columns,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The same of entries start .. start + KEYS, which lie in one block."""
    column = start // PER_BLOCK
    block = tl.load(table + column, mask=column < table_columns, other=0)
    place = tl.arange(0, KEYS)
    is_seen = (start + place < limit) & (block >= 0) & (block < num_blocks)
    page = pages + block.to(tl.int64) * page_stride + start % PER_BLOCK * (WIDTH // 32 * 17)
    return widened_keys(page + place * (WIDTH // 32 * 17), is_seen, WIDTH, KEYS)


@triton.jit
def widened_keys(row_at, is_seen, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    byte = tl.arange(0, WIDTH // 2)[None, :]
    codes = tl.load(row_at[:, None] + byte, mask=is_seen[:, None], other=0)
    factors = ue8m0(group_bytes(row_at + WIDTH // 2, is_seen, WIDTH // 32, WIDTH // 32, WIDTH % 128 == 0))
    return tl.reshape(scaled_e2m1(tl.reshape(codes, [KEYS, WIDTH // 32, 16]), factors), [KEYS, WIDTH])


@triton.jit
def queries_of(
    q, weights, token, num_tokens,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    """Queries [WIDTH, TOKENS * HEAD_TILE] bf16 of the tokens from `token` on, and their heads' weights."""
    line = tl.arange(0, TOKENS * HEAD_TILE)
    owner, head = (token + line // HEAD_TILE).to(tl.int64), line % HEAD_TILE
    is_line = (owner < num_tokens) & (head < HEADS)
    column = tl.arange(0, WIDTH)
    at = (owner * HEADS + head)[None, :] * WIDTH + column[:, None]
    queries = tl.load(q + at, mask=is_line[None, :], other=0.0)
    return queries, tl.load(weights + owner * HEADS + head, mask=is_line, other=0.0)


@triton.jit
def head_sums(keys, queries, share, TOKENS: tl.constexpr, HEAD_TILE: tl.constexpr):
    """sum over heads of weight * relu(q . key): [keys, TOKENS] float32."""
    dots = multiply(keys, queries, tl.zeros([keys.shape[0], TOKENS * HEAD_TILE], tl.float32), 0)
    products = tl.maximum(dots, 0.0) * share[None, :]
    return tl.sum(tl.reshape(products, [keys.shape[0], TOKENS, HEAD_TILE]), 2)


@triton.jit
def score_kernel(
    q, weights, pages, table, tile_rows, tile_firsts, tile_lasts, visible, scores,
    score_stride, page_stride, num_blocks, PER_BLOCK: tl.constexpr, table_columns,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEAD_TILE: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Some tokens of one row against some tiles of its entries; entries that none of them sees are left out."""
    tile = tl.program_id(1)
    first, last, row = tl.load(tile_firsts + tile), tl.load(tile_lasts + tile), tl.load(tile_rows + tile)
    begin = tl.program_id(0) * (KEYS * TILES)
    limit = 0
    if last > first:
        limit = tl.load(visible + last - 1)
    if begin < limit:
        queries, share = queries_of(q, weights, first, last, HEADS, WIDTH, TOKENS, HEAD_TILE)
        token = first + tl.arange(0, TOKENS)
        for start in range(begin, tl.minimum(limit, begin + KEYS * TILES), KEYS):
            entry = start + tl.arange(0, KEYS)
            line = table + row.to(tl.int64) * table_columns
            if PER_BLOCK % KEYS == 0:
                keys = neighbours_of(
                    pages, line, start, limit, page_stride, num_blocks, PER_BLOCK, table_columns, WIDTH, KEYS
                )
            else:
                keys = keys_of(
                    pages, line, entry, entry < limit, page_stride, num_blocks, PER_BLOCK, table_columns, WIDTH, KEYS
                )
            total = head_sums(keys, queries, share, TOKENS, HEAD_TILE)
            at = scores + token.to(tl.int64)[None, :] * score_stride + entry[:, None]
            tl.store(at, total, mask=(token < last)[None, :] & (entry < limit)[:, None])


@triton.jit
def candidate_kernel(
    q, weights, pages, table, token_rows, visible, candidates, scores,
    num_candidates, score_stride, page_stride, num_blocks, per_block: tl.constexpr, table_columns,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEAD_TILE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One token against some tiles of the entries of its candidate blocks; what it does not see gets -inf."""
    token = tl.program_id(1).to(tl.int64)
    row, limit = tl.load(token_rows + token), tl.load(visible + token)
    queries, share = queries_of(q, weights, token, token + 1, HEADS, WIDTH, 1, HEAD_TILE)
    for tile in range(TILES):
        place = (tl.program_id(0) * TILES + tile) * KEYS + tl.arange(0, KEYS)
        is_place = place < num_candidates * SIZE
        block = tl.load(candidates + token * num_candidates + place // SIZE, mask=is_place, other=-1)
        entry = block * SIZE + place % SIZE
        is_seen = (block >= 0) & (entry < limit)
        keys = keys_of(
            pages, table + row.to(tl.int64) * table_columns, tl.where(is_seen, entry, 0), is_seen, page_stride,
            num_blocks, per_block, table_columns, WIDTH, KEYS,
        )  # fmt: skip
        total = tl.reshape(head_sums(keys, queries, share, 1, HEAD_TILE), [KEYS])
        tl.store(scores + token * score_stride + place, tl.where(is_seen, total, float("-inf")), mask=is_place)


@triton.jit
def block_peak_kernel(scores, visible, peaks, score_stride, peak_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Best score of each block of one token; the block of its newest visible entry counts as infinity."""
    token = tl.program_id(1).to(tl.int64)
    limit = tl.load(visible + token)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE * SIZE < limit:
        peak = tl.full([TILE], float("-inf"), tl.float32)
        for member in tl.static_range(SIZE):
            entry = block * SIZE + member
            score = tl.load(scores + token * score_stride + entry, mask=entry < limit, other=float("-inf"))
            peak = tl.maximum(peak, score)
        peak = tl.where(block == (limit - 1) // SIZE, float("inf"), peak)
        tl.store(peaks + token * peak_stride + block, peak, mask=block * SIZE < limit)


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
    num_blocks = triton.cdiv(num_entries, indexer.candidate_size) if indexer.keeps_candidates else 0
    visible = (batch.positions + 1) // indexer.ratio
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
    """Rotated and e2m1-rounded index queries [T, heads * d] bf16, head weights [T, heads] float32."""
    q, dim = linear(low_rank, indexer.wq_b), indexer.dim
    if len(q):
        query_kernel[(len(q), indexer.num_heads)](
            q, batch.positions, indexer.frequencies, indexer.num_heads, dim, 2 * len(indexer.frequencies),
            triton.next_power_of_2(dim) // 2, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return q, linear(x, indexer.weights_proj, torch.float32) * (dim**-0.5 * indexer.num_heads**-0.5)


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
    part = slice(tokens.start, min(tokens.stop, batch.num_tokens))
    num_entries, seen = (batch.max_position + 1) // indexer.ratio, visible[part]
    count, size, table = min(indexer.top_k, num_entries), indexer.candidate_size, batch.block_table.contiguous()
    paging = index_pages.stride(0), index_pages.shape[0], index_pages.shape[1], table.shape[1]
    shape = indexer.num_heads, indexer.dim
    heads = triton.next_power_of_2(indexer.num_heads)
    if candidates is not None and not indexer.keeps_candidates:
        blocks = candidates[part].contiguous()
        width = blocks.shape[1] * size
        scores = torch.empty(len(seen), width, device=q.device)
        candidate_kernel[(triton.cdiv(width, CANDIDATE_TILE * CANDIDATE_TILES), len(seen))](
            q[part], weights[part], index_pages, table, batch.rows[part], seen, blocks, scores,
            blocks.shape[1], width, *paging, *shape, max(16, heads), size, CANDIDATE_TILE, CANDIDATE_TILES, num_warps=4,
        )  # fmt: skip
        limits = torch.full_like(seen, width)
        return Selection(best_columns(scores, limits, count, blocks, size), blocks)
    rows, firsts, lasts = _row_tiles(batch)
    scores = torch.empty(len(seen), num_entries, device=q.device)
    score_kernel[(triton.cdiv(num_entries, KEY_TILE * KEY_TILES), len(rows))](
        q[part], weights[part], index_pages, table, rows, (firsts - part.start).clamp(0, len(seen)),
        (lasts - part.start).clamp(0, len(seen)), seen, scores, num_entries, *paging, *shape,
        max(4, heads), TOKEN_TILE, KEY_TILE, KEY_TILES, num_warps=4,
    )  # fmt: skip
    entries = best_columns(scores, seen, count)
    if not indexer.keeps_candidates:
        return Selection(entries, candidates)
    num_blocks = triton.cdiv(num_entries, size)
    peaks = torch.empty(len(seen), num_blocks, device=q.device)
    block_peak_kernel[(triton.cdiv(num_blocks, 512), len(seen))](
        scores, seen, peaks, num_entries, num_blocks, size, 512
    )
    limits = (seen + (size - 1)) // size
    return Selection(entries, best_columns(peaks, limits, min(indexer.candidate_blocks, num_blocks)))


def _row_tiles(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Row, first token and end of every stretch of TOKEN_TILE tokens of one row; later ones may be empty."""
    return cast(tuple[Tensor, Tensor, Tensor], batch.once(("row tiles", TOKEN_TILE), lambda: _make_row_tiles(batch)))


def _make_row_tiles(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = len(batch.row_slots)
    ends = ((batch.row_offsets.diff() + (TOKEN_TILE - 1)) // TOKEN_TILE).cumsum(0)
    tile = torch.arange(min(batch.num_tokens, num_rows + batch.num_tokens // TOKEN_TILE), device=ends.device)
    rows = torch.searchsorted(ends, tile, right=True).clamp_max(num_rows - 1)
    begins = torch.cat([ends.new_zeros(1), ends])[rows]
    firsts = batch.row_offsets[rows] + (tile - begins).int() * TOKEN_TILE
    lasts = torch.minimum(firsts + TOKEN_TILE, batch.row_offsets[rows + 1])
    return rows.int(), firsts.int(), lasts.int()
