"""The best columns of a row of scores, ascending and exact, one program a row.

A score becomes an integer that orders alike. The wanted one, of which `count` are no smaller, is
found bit by bit by counting. A short row is counted in registers. For a long one, a sample gives a
cut that a few more than `count` columns should reach; these are collected in one pass and counted
in registers. Should they be too few or too many, whatever the scores, the whole row is counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def ordered(score, is_here):
    """float32 -> uint32 that order alike, 0 where not here or -inf; -0 counts as 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(is_here & (score > float("-inf")), key, 0)


@triton.jit
def keys_at(scores, column, limit):
    return ordered(tl.load(scores + column, mask=column < limit, other=float("-inf")), column < limit)


@triton.jit
def count_of(condition):
    return tl.sum(condition.to(tl.int32))


@triton.jit
def threshold_of(key, needed):
    """The largest number that at least `needed` of these keys reach."""
    found, bit = tl.full([], 0, tl.uint32), tl.full([], 1 << 31, tl.uint32)
    for _ in range(32):
        found = tl.where(count_of(key >= (found | bit)) >= needed, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def row_threshold(scores, limit, needed, TILE: tl.constexpr):
    """The same over a whole row."""
    column = tl.arange(0, TILE)
    found, bit = tl.full([], 0, tl.uint32), tl.full([], 1 << 31, tl.uint32)
    for _ in range(32):
        count = 0
        for start in range(0, limit, TILE):
            count += count_of(keys_at(scores, start + column, limit) >= (found | bit))
        found = tl.where(count >= needed, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def emit(key, column, threshold, spare, blocks, chosen, written, num_equal, BLOCK_SIZE: tl.constexpr):
    """Write the columns above the threshold and the first `spare` that equal it; what was written and seen so far."""
    is_equal = (key == threshold).to(tl.int32)
    rank = num_equal + tl.cumsum(is_equal, 0) - is_equal
    keep = (key > threshold).to(tl.int32) | (is_equal & (rank < spare).to(tl.int32))
    if BLOCK_SIZE > 0:
        block = tl.load(blocks + column // BLOCK_SIZE, mask=keep > 0, other=0)
        column = block * BLOCK_SIZE + column % BLOCK_SIZE
    tl.store(chosen + written + tl.cumsum(keep, 0) - keep, column, mask=keep > 0)
    return written + tl.sum(keep), num_equal + tl.sum(is_equal)


@triton.jit
def select_kernel(
    scores, limits, blocks, chosen, collected, score_stride, num_blocks,
    COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row. BLOCK_SIZE > 0: column c stands for entry blocks[row, c // BLOCK_SIZE] * BLOCK_SIZE + c % BLOCK_SIZE."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + row)
    scores, chosen, collected = scores + row * score_stride, chosen + row * COUNT, collected + row * TILE
    blocks += row * num_blocks
    place = tl.arange(0, TILE)
    written = 0
    if limit <= TILE:
        key = keys_at(scores, place, limit)
        needed = tl.minimum(COUNT, count_of(key > 0))
        if needed > 0:
            threshold = threshold_of(key, needed)
            spare = needed - count_of(key > threshold)
            written, _ = emit(key, place, threshold, spare, blocks, chosen, 0, 0, BLOCK_SIZE)
    else:
        rank = tl.minimum(TILE, COUNT * 5 // 4 * TILE // limit + 32)
        cut = threshold_of(keys_at(scores, place * (limit // TILE), limit), rank)
        cut = tl.where(cut == 0, 1, cut).to(tl.uint32)
        found, valid = 0, 0
        for start in range(0, limit, TILE):
            key = keys_at(scores, start + place, limit)
            keep = (key >= cut).to(tl.int32)
            at = found + tl.cumsum(keep, 0) - keep
            tl.store(collected + at, start + place, mask=(keep > 0) & (at < TILE))
            found += tl.sum(keep)
            valid += count_of(key > 0)
        needed = tl.minimum(COUNT, valid)
        tl.debug_barrier()
        if (needed > 0) & (found >= needed) & (found <= TILE):
            column = tl.load(collected + place, mask=place < found, other=0)
            key = tl.where(place < found, keys_at(scores, column, limit), 0)
            threshold = threshold_of(key, needed)
            spare = needed - count_of(key > threshold)
            written, _ = emit(key, column, threshold, spare, blocks, chosen, 0, 0, BLOCK_SIZE)
        elif needed > 0:
            threshold = row_threshold(scores, limit, needed, TILE)
            above = 0
            for start in range(0, limit, TILE):
                above += count_of(keys_at(scores, start + place, limit) > threshold)
            num_equal = 0
            for start in range(0, limit, TILE):
                key = keys_at(scores, start + place, limit)
                written, num_equal = emit(
                    key, start + place, threshold, needed - above, blocks, chosen, written, num_equal, BLOCK_SIZE
                )
    for start in range(0, COUNT, TILE):
        tl.store(chosen + start + place, -1 + place * 0, mask=(start + place >= written) & (start + place < COUNT))


def best_columns(
    scores: Tensor, limits: Tensor, count: int, blocks: Tensor | None = None, block_size: int = 0
) -> Tensor:
    """The `count` best of the first limits[row] columns, ascending, ties to the lower, -1 behind: [rows, count] int32.

    scores [rows, n] float32; -inf is never chosen. limits [rows] int32. blocks [rows, c] int32: the
    columns are the entries of these blocks of `block_size`, and entries are given back.
    """
    num_rows = len(scores)
    chosen = torch.empty(num_rows, count, dtype=torch.int32, device=scores.device)
    if chosen.numel():
        tile = min(TILE, max(256, triton.next_power_of_2(scores.shape[1])))
        collected = torch.empty(num_rows, tile, dtype=torch.int32, device=scores.device)
        select_kernel[(num_rows,)](
            scores, limits, limits if blocks is None else blocks, chosen, collected, scores.stride(0),
            0 if blocks is None else blocks.shape[1], count, block_size, tile, num_warps=8,
        )  # fmt: skip
    return chosen
