"""Attention of each token over its window and its selected compressed entries, read as they are packed.

One program a token and half of the value columns, 64 heads: keys are gathered and widened a tile at
a time, and serve as values too. A program holds 64 x 256 sums; 64 x 512 would need the registers of
two groups of warps, and 64 rows feed one. The softmax runs over tiles in one order, so that a
token's result does not rest on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.numbers import from_e4m3_bytes, multiply, scaled_e2m1, to_bf16, ue8m0
from deepinfer.backends.cuda.hopper.projections import Attention
from deepinfer.backends.cuda.hopper.rings import write_ring
from deepinfer.backends.cuda.hopper.rope import rotate_heads
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect, require

PART = 256  # value columns of one program
KEYS = 32  # keys of one tile
NUM_STAGES = 1  # tiles are widened in registers, so their loads are not run ahead


@triton.jit
def fold_in(scores, keys, is_seen, scale, peak, total, result):
    """Online softmax (Milakov and Gimelshein, arXiv:1805.02867) of one tile of keys, which are the values too."""
    scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    decay = tl.exp(peak - new_peak)
    share = tl.exp(scores - new_peak[:, None])
    total = total * decay + tl.sum(share, 1)
    return new_peak, total, multiply(to_bf16(share), keys, result * decay[:, None], 0)


@triton.jit
def window_keys(old_at, new_at, is_old, is_new, base, WIDTH: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr):
    """Columns base .. base + PART of packed window rows: [KEYS, PART] bf16."""
    group, member = base // 32 + tl.arange(0, PART // 32)[None, :, None], tl.arange(0, 32)[None, None, :]
    is_group = group < WIDTH // 32
    old_at, new_at = old_at[:, None, None], new_at[:, None, None]
    is_old, is_new = is_old[:, None, None] & is_group, is_new[:, None, None] & is_group
    codes = tl.load(old_at + group * 32 + member, mask=is_old, other=0)
    codes |= tl.load(new_at + group * 32 + member, mask=is_new, other=0)
    factors = tl.load(old_at + WIDTH + group, mask=is_old, other=0)
    factors |= tl.load(new_at + WIDTH + group, mask=is_new, other=0)
    return to_bf16(tl.reshape(from_e4m3_bytes(codes) * ue8m0(factors), [KEYS, PART]))


@triton.jit
def entry_keys(row_at, is_seen, base, WIDTH: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr):
    """Columns base .. base + PART of packed compressed rows: [KEYS, PART] bf16."""
    group, member = base // 16 + tl.arange(0, PART // 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    row_at, is_read = row_at[:, None, None], is_seen[:, None, None] & (group < WIDTH // 16)
    codes = tl.load(row_at + group * 8 + member, mask=is_read, other=0)
    factors = from_e4m3_bytes(tl.load(row_at + WIDTH // 2 + group, mask=is_read, other=0))
    return tl.reshape(scaled_e2m1(codes, factors), [KEYS, PART])


@triton.jit
def attend_kernel(
    q, rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots, window_starts, table,
    sink, out, scale, ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns,
    num_entries,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    HEAD_TILE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. Scores need all columns, of which this program sums one part as values."""
    token = tl.program_id(1).to(tl.int64)
    position, row = tl.load(positions + token), tl.load(token_rows + token)
    own = tl.program_id(0) % PARTS * PART
    other = PART - own  # of two parts
    head = tl.program_id(0) // PARTS * HEAD_TILE + tl.arange(0, HEAD_TILE)
    column = tl.arange(0, PART)
    at = (token * HEADS + head)[:, None] * WIDTH + column[None, :]
    is_own = (head < HEADS)[:, None] & (own + column < WIDTH)[None, :]
    q_own = tl.load(q + at + own, mask=is_own, other=0.0)
    if PARTS == 2:
        q_other = tl.load(q + at + other, mask=(head < HEADS)[:, None] & (other + column < WIDTH)[None, :], other=0.0)
    peak = tl.full([HEAD_TILE], -1e30, tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    result = tl.zeros([HEAD_TILE, PART], tl.float32)
    key = tl.arange(0, KEYS)

    start, slot = tl.load(row_starts + row), tl.load(row_slots + row)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0).to(tl.int64)
    oldest = tl.maximum(tl.maximum(position - (WINDOW - 1), tl.load(window_starts + row)), 0)
    first = tl.load(row_offsets + row) - start  # token of this step = first + position
    for begin in range(0, WINDOW, KEYS):
        place = oldest + begin + key
        is_seen = (place <= position) & (begin + key < WINDOW)
        is_new, is_old = is_seen & (place >= start), is_seen & (place < start)
        old_at = ring + slot * ring_stride + (place % ring_length).to(tl.int64) * (WIDTH // 32 * 33)
        new_at = rows + (first + tl.where(is_new, place, start)).to(tl.int64) * (WIDTH // 32 * 33)
        keys = window_keys(old_at, new_at, is_old, is_new, own, WIDTH, KEYS, PART)
        scores = multiply(q_own, tl.trans(keys), tl.zeros([HEAD_TILE, KEYS], tl.float32), 0)
        if PARTS == 2:
            more = window_keys(old_at, new_at, is_old, is_new, other, WIDTH, KEYS, PART)
            scores = multiply(q_other, tl.trans(more), scores, 0)
        peak, total, result = fold_in(scores, keys, is_seen, scale, peak, total, result)

    if HAS_ENTRIES:
        for begin in range(0, num_entries, KEYS):
            is_seen = begin + key < num_entries
            entry = tl.load(entries + token * num_entries + begin + key, mask=is_seen, other=-1)
            is_seen &= (entry >= 0) & (entry < table_columns * per_block)
            entry = tl.where(is_seen, entry, 0)
            block = tl.load(table + row.to(tl.int64) * table_columns + entry // per_block, mask=is_seen, other=0)
            is_seen &= (block >= 0) & (block < num_blocks)
            row_at = pages + block.to(tl.int64) * page_stride + (entry % per_block).to(tl.int64) * (WIDTH // 16 * 9)
            keys = entry_keys(row_at, is_seen, own, WIDTH, KEYS, PART)
            scores = multiply(q_own, tl.trans(keys), tl.zeros([HEAD_TILE, KEYS], tl.float32), 0)
            if PARTS == 2:
                scores = multiply(q_other, tl.trans(entry_keys(row_at, is_seen, other, WIDTH, KEYS, PART)), scores, 0)
            peak, total, result = fold_in(scores, keys, is_seen, scale, peak, total, result)

    total += tl.exp(tl.load(sink + head, mask=head < HEADS, other=0.0) - peak)
    tl.store(out + at + own, to_bf16(result / total[:, None]), mask=is_own)


def attend(
    q: Tensor,
    window_rows: Tensor,
    batch: TokenBatch,
    ring: Tensor,
    pages: Tensor | None,
    entries: Tensor | None,
    attention: Attention,
) -> Tensor:
    """Softmax over window, entries and sink, then the inverse rotation: [T, h, D] bf16."""
    num_tokens, heads, dim, window = batch.num_tokens, attention.num_heads, attention.dim, attention.window
    expect("q", q, (num_tokens, heads, dim), torch.bfloat16)
    expect("window rows", window_rows, (num_tokens, dim // 32 * 33), torch.uint8)
    expect("window ring", ring, (None, None, window_rows.shape[1]), torch.uint8)
    require(ring.shape[1] >= window - 1, f"the window ring holds {ring.shape[1]} positions; it must hold {window - 1}")
    require((pages is None) == (entries is None), "pages and entries are given together or not at all")
    has_entries = pages is not None and entries is not None and entries.shape[1] > 0
    if pages is None or entries is None:
        pages, entries = ring, batch.positions.unsqueeze(1)  # never read
    else:
        expect("compressed pages", pages, (None, None, dim // 16 * 9), torch.uint8)
        expect("entries", entries, (num_tokens, None), torch.int32)
    out = torch.empty(num_tokens, heads, dim, dtype=torch.bfloat16, device=q.device)
    if not num_tokens:
        return out
    table = batch.block_table.contiguous()
    head_tile, wide = min(64, max(16, triton.next_power_of_2(heads))), max(32, triton.next_power_of_2(dim))
    parts = triton.cdiv(wide, PART)
    require(parts <= 2, f"the head dimension is {dim}; it must be at most {2 * PART}")
    attend_kernel[(triton.cdiv(heads, head_tile) * parts, num_tokens)](
        q.contiguous(), window_rows.contiguous(), ring, pages, entries.contiguous(), batch.positions, batch.rows,
        batch.row_offsets, batch.row_starts, batch.row_slots, batch.window_starts, table, attention.sink, out,
        dim**-0.5, ring.shape[1], ring.stride(0), ring.shape[0], pages.stride(0), pages.shape[0], pages.shape[1],
        table.shape[1], entries.shape[1],
        HEADS=heads, WIDTH=dim, WINDOW=window, HAS_ENTRIES=has_entries,
        HEAD_TILE=head_tile, PARTS=parts, PART=min(PART, wide), KEYS=KEYS, num_warps=4, num_stages=NUM_STAGES,
    )  # fmt: skip
    rotate_heads(out, batch.positions, attention.frequencies, backwards=True)
    return out


def store_window(window_rows: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` window rows into its slot's ring."""
    write_ring(ring, window_rows, batch)
