"""Scores of packed index keys: of all entries that tokens of one row see, or of a token's candidate blocks.

Queries q are e4m3 bytes [T, heads * d], weights [T, heads] float32 make up for their scales (`indexer.py`). Triton's
kernels sum in float32; those in CUDA C++ sum products in half precision (`native/indexer.cu` says how exact that is).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.numbers import from_e4m3_bytes, group_bytes, multiply, scaled_e2m1, to_bf16, ue8m0
from deepinfer.backends.cuda.hopper.selection import GROUP, empty_scores
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.backends.cuda.native import Kernel, load
from deepinfer.ops.batch import TokenBatch

if TYPE_CHECKING:
    from deepinfer.backends.cuda.hopper.indexer import Indexer

TOKEN_TILE = 4  # tokens of one row that are scored together
KEY_TILE = 64
KEY_TILES = 16  # that one program scores
CANDIDATE_TILE, CANDIDATE_TILES = 128, 8  # the same where entries are gathered
NATIVE = Path(__file__).parent / "native" / "indexer.cu"
NATIVE_HEADS, NATIVE_DIM, NATIVE_THREADS, NATIVE_TILE = 32, 128, 128, 64  # as in this source
NATIVE_TILES, NATIVE_PROGRAMS = 64, 6 * 132  # that one program scores at most, and programs that an H200 runs at a time
NATIVE_CANDIDATE_TILES, NATIVE_CANDIDATE_PROGRAMS = 32, 9 * 132


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
    """Packed keys at these addresses as bf16 [KEYS, WIDTH], zeros where not seen."""
    byte = tl.arange(0, WIDTH // 2)[None, :]
    codes = tl.load(row_at[:, None] + byte, mask=is_seen[:, None], other=0)
    factors = ue8m0(group_bytes(row_at + WIDTH // 2, is_seen, WIDTH // 32, WIDTH // 32, WIDTH % 128 == 0))
    return tl.reshape(scaled_e2m1(tl.reshape(codes, [KEYS, WIDTH // 32, 16]), factors), [KEYS, WIDTH])


@triton.jit
def queries_of(
    q, weights, token, num_tokens,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    """Queries [WIDTH, TOKENS * HEAD_TILE] bf16, from e4m3, of the tokens from `token` on, and their heads' weights."""
    line = tl.arange(0, TOKENS * HEAD_TILE)
    owner, head = (token + line // HEAD_TILE).to(tl.int64), line % HEAD_TILE
    is_line = (owner < num_tokens) & (head < HEADS)
    column = tl.arange(0, WIDTH)
    at = (owner * HEADS + head)[None, :] * WIDTH + column[:, None]
    queries = to_bf16(from_e4m3_bytes(tl.load(q + at, mask=is_line[None, :], other=0)))
    return queries, tl.load(weights + owner * HEADS + head, mask=is_line, other=0.0)


@triton.jit
def head_sums(keys, queries, share, TOKENS: tl.constexpr, HEAD_TILE: tl.constexpr):
    """sum over heads of weight * relu(q . key): [keys, TOKENS] float32."""
    dots = multiply(keys, queries, tl.zeros([keys.shape[0], TOKENS * HEAD_TILE], tl.float32), 0)
    products = tl.maximum(dots, 0.0) * share[None, :]
    return tl.sum(tl.reshape(products, [keys.shape[0], TOKENS, HEAD_TILE]), 2)


@triton.jit
def score_kernel(
    q, weights, pages, table, tile_rows, tile_firsts, tile_lasts, visible, scores, peaks,
    score_stride, peak_stride, page_stride, num_blocks, PER_BLOCK: tl.constexpr, table_columns, part_first, part_last,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEAD_TILE: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Some tokens of one row against some tiles of its entries: scores, and each group's best that a token sees."""
    tile = tl.program_id(0)
    row = tl.load(tile_rows + tile).to(tl.int64)
    first = tl.maximum(tl.load(tile_firsts + tile), part_first)
    last = tl.minimum(tl.load(tile_lasts + tile), part_last)
    begin = tl.program_id(1) * (KEYS * TILES)
    limit = 0
    if last > first:
        limit = tl.load(visible + last - 1)
    if begin < limit:
        queries, share = queries_of(q, weights, first, last, HEADS, WIDTH, TOKENS, HEAD_TILE)
        token = first + tl.arange(0, TOKENS)
        own_limit = tl.load(visible + token, mask=token < last, other=0)[None, :]
        line = (token - part_first).to(tl.int64)[None, :]
        for start in range(begin, tl.minimum(limit, begin + KEYS * TILES), KEYS):
            entry = start + tl.arange(0, KEYS)
            line_table = table + row * table_columns
            if PER_BLOCK % KEYS == 0:
                keys = neighbours_of(
                    pages, line_table, start, limit, page_stride, num_blocks, PER_BLOCK, table_columns, WIDTH, KEYS
                )
            else:
                keys = keys_of(
                    pages, line_table, entry, entry < limit, page_stride, num_blocks, PER_BLOCK, table_columns,
                    WIDTH, KEYS,
                )  # fmt: skip
            total = head_sums(keys, queries, share, TOKENS, HEAD_TILE)
            is_seen = entry[:, None] < own_limit
            tl.store(scores + line * score_stride + entry[:, None], total, mask=is_seen)
            peak = tl.where(is_seen & (total > float("-inf")), total, float("-inf"))  # not a number: never chosen
            peak = tl.reshape(peak, [KEYS // GROUP, GROUP, TOKENS])
            group = (start // GROUP + tl.arange(0, KEYS // GROUP))[:, None]
            tl.store(peaks + line * peak_stride + group, tl.max(peak, 1), mask=group * GROUP < own_limit)


@triton.jit
def candidate_kernel(
    q, weights, pages, table, token_rows, visible, candidates, scores,
    score_stride, page_stride, num_blocks, per_block: tl.constexpr, table_columns, num_candidates, part_first,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HEAD_TILE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One token against some tiles of the entries of its candidate blocks; what it does not see is left out."""
    line = tl.program_id(0).to(tl.int64)
    token = part_first + line
    row, limit = tl.load(token_rows + token), tl.load(visible + token)
    queries, share = queries_of(q, weights, token, token + 1, HEADS, WIDTH, 1, HEAD_TILE)
    for tile in range(TILES):
        place = (tl.program_id(1) * TILES + tile) * KEYS + tl.arange(0, KEYS)
        is_place = place < num_candidates * SIZE
        block = tl.load(candidates + line * num_candidates + place // SIZE, mask=is_place, other=-1)
        entry = block * SIZE + place % SIZE
        is_seen = (block >= 0) & (entry < limit)
        keys = keys_of(
            pages, table + row.to(tl.int64) * table_columns, tl.where(is_seen, entry, 0), is_seen, page_stride,
            num_blocks, per_block, table_columns, WIDTH, KEYS,
        )  # fmt: skip
        total = tl.reshape(head_sums(keys, queries, share, 1, HEAD_TILE), [KEYS])
        tl.store(scores + line * score_stride + place, total, mask=is_seen)


def _native(name: str, q: Tensor, indexer: Indexer, index_pages: Tensor, neighbours: int) -> Kernel | None:
    """The CUDA C++ kernel for the released sizes, copying `neighbours` keys at a time; None where Triton's must do."""
    fits = (indexer.num_heads, indexer.dim) == (NATIVE_HEADS, NATIVE_DIM) and index_pages.shape[1] % neighbours == 0
    is_aligned = index_pages.stride(0) % 16 == 0 and index_pages.data_ptr() % 16 == 0 and q.data_ptr() % 16 == 0
    if q.device.type != "cuda" or not fits or not is_aligned:
        return None
    return load(NATIVE, name, NATIVE_THREADS, 0, q.device.index or 0)


def entry_scores(
    q: Tensor,
    weights: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    visible: Tensor,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Scores [last - first, entries] float32 of these tokens, and the best visible one of each GROUP entries."""
    num_entries, table = (batch.max_position + 1) // indexer.ratio, batch.block_table.contiguous()
    scores = empty_scores(last - first, num_entries, q.device)
    peaks = empty_scores(last - first, cdiv(num_entries, GROUP), q.device)
    rows, firsts, lasts = _row_tiles(batch)
    strides = scores.stride(0), peaks.stride(0)
    given = q, weights, index_pages, table, rows, firsts, lasts, visible, scores, peaks, *strides
    paging = index_pages.stride(0), index_pages.shape[0], index_pages.shape[1], table.shape[1]
    if kernel := _native("score_keys", q, indexer, index_pages, NATIVE_TILE):
        num_tiles = cdiv(num_entries, NATIVE_TILE)
        tiles = min(NATIVE_TILES, cdiv(num_tiles, max(1, NATIVE_PROGRAMS * TOKEN_TILE // (last - first))))
        kernel.launch((len(rows), cdiv(num_tiles, tiles), 1), (*given, *paging, first, last, tiles))
        return scores, peaks
    score_kernel[(len(rows), cdiv(num_entries, KEY_TILE * KEY_TILES))](
        *given, *paging, first, last, indexer.num_heads, indexer.dim, max(4, next_power_of_2(indexer.num_heads)),
        GROUP, TOKEN_TILE, KEY_TILE, KEY_TILES, num_warps=4,
    )  # fmt: skip
    return scores, peaks


def candidate_scores(
    q: Tensor,
    weights: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    blocks: Tensor,
    visible: Tensor,
    first: int,
) -> Tensor:
    """Scores [tokens, blocks * size] float32 of the entries of these tokens' blocks; not defined where not visible."""
    (num_tokens, num_blocks), size, table = blocks.shape, indexer.candidate_size, batch.block_table.contiguous()
    scores = torch.empty(num_tokens, num_blocks * size, device=q.device)
    given = q, weights, index_pages, table, batch.rows, visible, blocks, scores, num_blocks * size
    paging = index_pages.stride(0), index_pages.shape[0], index_pages.shape[1], table.shape[1]
    if size == GROUP and (kernel := _native("score_candidates", q, indexer, index_pages, GROUP)):
        num_tiles = cdiv(num_blocks * size, NATIVE_TILE)
        programs = max(1, NATIVE_CANDIDATE_PROGRAMS // num_tokens)
        tiles = min(NATIVE_CANDIDATE_TILES, cdiv(num_tiles, programs))
        kernel.launch((num_tokens, cdiv(num_tiles, tiles), 1), (*given, *paging, num_blocks, first, tiles))
        return scores
    candidate_kernel[(num_tokens, cdiv(num_blocks * size, CANDIDATE_TILE * CANDIDATE_TILES))](
        *given, *paging, num_blocks, first, indexer.num_heads, indexer.dim,
        max(16, next_power_of_2(indexer.num_heads)), size, CANDIDATE_TILE, CANDIDATE_TILES, num_warps=4,
    )  # fmt: skip
    return scores


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
