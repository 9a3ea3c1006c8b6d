"""Attention of each token over its window and its selected compressed entries, read as they are packed.

One program a token and 64 heads, which feed one group of warps as rows of a product. 64 x 512 sums
need the registers of two, so shares and values are two kernels: the first has no sums to keep, the
second one product, whose columns two groups divide. Both gather and widen keys a tile at a time, in
one order, so that a token's result does not rest on the batch.
"""

from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.attended import AttendedPanels, empty_attended
from deepinfer.backends.cuda.hopper.numbers import (
    from_e4m3_bytes,
    group_bytes,
    multiply,
    scaled_e2m1,
    to_bf16,
    ue8m0,
)
from deepinfer.backends.cuda.hopper.projections import Attention
from deepinfer.backends.cuda.hopper.rings import write_ring
from deepinfer.backends.cuda.hopper.rope import rotate_heads
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.backends.cuda.native import Kernel, load, num_multiprocessors
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect, require

SHARE_KEYS = 64  # of one tile, as in the released softmax
VALUE_KEYS = 32
SHARE_WARPS = 8
PLACES_SOURCE = Path(__file__).parent / "native" / "places.cu"
WIDE_SOURCE = Path(__file__).parent / "native" / "attention.cu"  # and its sizes
WIDE_DIM, WIDE_HEADS, WIDE_GROUP, WIDE_TURNS, WIDE_THREADS, WIDE_SHARED_BYTES = 512, 64, 8, 64, 512, 221632
NARROW = 8  # bytes of codes that a thread takes at once, so that widened ones spread over all banks


@triton.jit
def window_keys(old_at, new_at, is_old, is_new, WIDTH: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr):
    """Packed window rows: [KEYS, TILE] bf16."""
    column = tl.arange(0, TILE)[None, :]
    codes = tl.load(old_at[:, None] + column, mask=is_old[:, None] & (column < WIDTH), other=0)
    codes |= tl.load(new_at[:, None] + column, mask=is_new[:, None] & (column < WIDTH), other=0)
    has_words: tl.constexpr = WIDTH % 128 == 0
    factors = group_bytes(old_at + WIDTH, is_old, WIDTH // 32, TILE // 32, has_words)
    factors |= group_bytes(new_at + WIDTH, is_new, WIDTH // 32, TILE // 32, has_words)
    values = tl.reshape(from_e4m3_bytes(codes), [KEYS, TILE // 32, 32]) * ue8m0(factors)
    return to_bf16(tl.reshape(values, [KEYS, TILE]))


@triton.jit
def entry_keys(row_at, is_seen, WIDTH: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr):
    """Packed compressed rows: [KEYS, TILE] bf16."""
    byte = tl.max_contiguous(tl.arange(0, TILE // 2), NARROW)[None, :]
    codes = tl.load(row_at[:, None] + byte, mask=is_seen[:, None] & (byte < WIDTH // 2), other=0)
    factors = group_bytes(row_at + WIDTH // 2, is_seen, WIDTH // 16, TILE // 16, WIDTH % 64 == 0).to(tl.uint8)
    codes = tl.reshape(codes, [KEYS, TILE // 16, 8])
    return tl.reshape(scaled_e2m1(codes, from_e4m3_bytes(factors)), [KEYS, TILE])


@triton.jit
def keys_of(
    begin, token, rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots, window_starts,
    table, ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, WINDOW_TILE: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Keys begin .. begin + KEYS of a token, first its window, padded to WINDOW_TILE, then its entries; which exist.

    SPAN keys are in a window: WINDOW, or in a block of drafts as many before the row and the row itself.
    """
    position, row = tl.load(positions + token), tl.load(token_rows + token)
    key = begin + tl.arange(0, KEYS)
    if begin < WINDOW_TILE:
        start, slot = tl.load(row_starts + row), tl.load(row_slots + row)
        slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0).to(tl.int64)
        last = position
        newest = position
        if SPAN > WINDOW:
            last = start - 1
            newest = last + tl.load(row_offsets + row + 1) - tl.load(row_offsets + row)
        oldest = tl.maximum(tl.maximum(last - (WINDOW - 1), tl.load(window_starts + row)), 0)
        place = oldest + key
        is_seen = (place <= newest) & (key < SPAN)
        is_new, is_old = is_seen & (place >= start), is_seen & (place < start)
        old_at = ring + slot * ring_stride + (place % ring_length).to(tl.int64) * (WIDTH // 32 * 33)
        token_of = tl.load(row_offsets + row) - start + tl.where(is_new, place, start)
        new_at = rows + token_of.to(tl.int64) * (WIDTH // 32 * 33)
        keys = window_keys(old_at, new_at, is_old, is_new, WIDTH, KEYS, TILE)
    else:
        place = key - WINDOW_TILE
        entry = tl.load(entries + token * num_entries + place, mask=place < num_entries, other=-1)
        is_seen = (entry >= 0) & (entry < table_columns * per_block)
        entry = tl.where(is_seen, entry, 0)
        block = tl.load(table + row.to(tl.int64) * table_columns + entry // per_block, mask=is_seen, other=0)
        is_seen = is_seen & (block >= 0) & (block < num_blocks)
        row_at = pages + block.to(tl.int64) * page_stride + (entry % per_block).to(tl.int64) * (WIDTH // 16 * 9)
        keys = entry_keys(row_at, is_seen, WIDTH, KEYS, TILE, NARROW)
    return keys, is_seen


@triton.jit
def share_kernel(
    q, sink, shares, peaks, totals, scale, num_keys, share_stride,
    rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots, window_starts, table,
    ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, WINDOW_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Shares of a token's keys, exp(score - peak so far) [HEADS, keys] bf16, and each tile's peak, from which on the
    online softmax (Milakov and Gimelshein, arXiv:1805.02867) would rescale; the total at the last peak."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    is_head = head < HEADS
    at = (token * HEADS + head)[:, None] * WIDTH + column[None, :]
    query = tl.load(q + at, mask=is_head[:, None] & (column < WIDTH)[None, :], other=0.0)
    peak = tl.full([HEAD_TILE], -1e30, tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    for begin in range(0, num_keys, KEYS):
        keys, is_seen = keys_of(
            begin, token, rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots,
            window_starts, table, ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block,
            table_columns, num_entries, WIDTH, WINDOW, SPAN, WINDOW_TILE, KEYS, TILE, NARROW,
        )  # fmt: skip
        scores = multiply(query, tl.trans(keys), tl.zeros([HEAD_TILE, KEYS], tl.float32), 0) * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        share = tl.exp(scores - new_peak[:, None])
        total = total * tl.exp(peak - new_peak) + tl.sum(share, 1)
        peak = new_peak
        key = begin + tl.arange(0, KEYS)
        tl.store(
            shares + (token * HEADS + head)[:, None] * share_stride + key[None, :],
            to_bf16(share),
            mask=is_head[:, None],
        )
        tl.store(peaks + (token * (share_stride // KEYS) + begin // KEYS) * HEADS + head, peak, mask=is_head)
    total += tl.exp(tl.load(sink + head, mask=is_head, other=0.0) - peak)
    tl.store(totals + token * HEADS + head, total, mask=is_head)


@triton.jit
def value_kernel(
    shares, peaks, totals, out, num_keys, share_stride,
    rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots, window_starts, table,
    ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, WINDOW_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr, SHARE_KEYS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sum of a token's keys by their shares, over the total."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    is_head = head < HEADS
    peak_at = peaks + token * (share_stride // SHARE_KEYS) * HEADS + head
    last = tl.load(peak_at + (num_keys - 1) // SHARE_KEYS * HEADS, mask=is_head, other=0.0)
    result = tl.zeros([HEAD_TILE, TILE], tl.float32)
    for begin in range(0, num_keys, KEYS):
        keys, _ = keys_of(
            begin, token, rows, ring, pages, entries, positions, token_rows, row_offsets, row_starts, row_slots,
            window_starts, table, ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block,
            table_columns, num_entries, WIDTH, WINDOW, SPAN, WINDOW_TILE, KEYS, TILE, NARROW,
        )  # fmt: skip
        key = begin + tl.arange(0, KEYS)
        at = (token * HEADS + head)[:, None] * share_stride + key[None, :]
        share = tl.load(shares + at, mask=is_head[:, None], other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(peak_at + begin // SHARE_KEYS * HEADS, mask=is_head, other=0.0) - last)
        result = multiply(to_bf16(share * decay[:, None]), keys, result, 0)
    total = tl.load(totals + token * HEADS + head, mask=is_head, other=1.0)
    at = (token * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, to_bf16(result / total[:, None]), mask=is_head[:, None] & (column < WIDTH)[None, :])


def wide_kernels(q: Tensor, attention: Attention, ring: Tensor, pages: Tensor) -> tuple[Kernel, Kernel] | None:
    """CUDA C++ kernels for sizes like the released ones, places of keys and attention; None where Triton's must do."""
    (_, heads, dim), pairs = q.shape, len(attention.frequencies)
    fits = dim == WIDE_DIM and heads % WIDE_HEADS == 0 and pairs <= WIDE_TURNS and pairs % 4 == 0
    fits = fits and attention.wo_a.rounds_input and heads == WIDE_GROUP * attention.num_groups
    is_aligned = all(rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0 for rows in (ring, pages))
    if q.device.type != "cuda" or not fits or not is_aligned:
        return None
    device = q.device.index or 0
    places = load(PLACES_SOURCE, "find_places", 128, 0, device)
    kernel = load(WIDE_SOURCE, "attend", WIDE_THREADS, WIDE_SHARED_BYTES, device)
    return (places, kernel) if places and kernel else None


def find_places(
    kernel: Kernel, num_keys: int, pages: Tensor, entries: Tensor, *others: Tensor | int
) -> tuple[Tensor, Tensor]:
    """Where the packed rows of each token's keys lie [T, num_keys] int64, and tiles to be read [T, 2] int32."""
    num_tokens = entries.shape[0]
    places = torch.empty(num_tokens, num_keys, dtype=torch.int64, device=entries.device)
    tiles = torch.empty(num_tokens, 2, dtype=torch.int32, device=entries.device)
    kernel.launch((num_tokens, 1, 1), (places, tiles, pages, entries, *others, num_keys))
    return places, tiles


def attend(
    q: Tensor,
    window_rows: Tensor,
    batch: TokenBatch,
    ring: Tensor,
    pages: Tensor | None,
    entries: Tensor | None,
    attention: Attention,
) -> Tensor | AttendedPanels:
    """Softmax over window, entries and sink, then the inverse rotation: [T, h, D] bf16, or as e4m3 in panels."""
    num_tokens, heads, dim, window = batch.num_tokens, attention.num_heads, attention.dim, attention.window
    expect("q", q, (num_tokens, heads, dim), torch.bfloat16)
    expect("window rows", window_rows, (num_tokens, dim // 32 * 33), torch.uint8)
    expect("window ring", ring, (None, None, window_rows.shape[1]), torch.uint8)
    require(ring.shape[1] >= window - 1, f"the window ring holds {ring.shape[1]} positions; it must hold {window - 1}")
    require((pages is None) == (entries is None), "pages and entries are given together or not at all")
    require(dim % 32 == 0 and dim <= 512, f"the head dimension is {dim}; it must be a multiple of 32 up to 512")
    selected = entries
    if pages is None or entries is None:
        pages, entries = ring, batch.positions.new_empty(num_tokens, 0)
    else:
        expect("compressed pages", pages, (None, None, dim // 16 * 9), torch.uint8)
        expect("entries", entries, (num_tokens, None), torch.int32)
    if not num_tokens:
        return torch.empty_like(q)
    span = window + (num_tokens // len(batch.row_slots) if batch.is_block else 0)  # rows of a block are equally long
    q, window_rows, entries = q.contiguous(), window_rows.contiguous(), entries.contiguous()
    table, window_tile = batch.block_table.contiguous(), cdiv(span, SHARE_KEYS) * SHARE_KEYS
    num_keys = window_tile + cdiv(entries.shape[1], SHARE_KEYS) * SHARE_KEYS
    places = (
        window_rows, ring, pages, entries, batch.positions, batch.rows, batch.row_offsets, batch.row_starts,
        batch.row_slots, batch.window_starts, table, ring.shape[1], ring.stride(0), ring.shape[0], pages.stride(0),
        pages.shape[0], pages.shape[1], table.shape[1], entries.shape[1],
    )  # fmt: skip
    if kernels := wide_kernels(q, attention, ring, pages):
        attended = empty_attended(num_tokens, attention.num_groups, heads, dim, q.device)
        panels = attended.panels
        groups = heads // WIDE_HEADS
        items = num_tokens * groups
        sizes = window, span, window_tile
        key = *sizes, *ring.shape, ring.stride(0), pages.data_ptr() if selected is not None else 0
        found = batch.latest(
            ("places of keys", selected is None), selected, key,
            lambda: find_places(kernels[0], num_keys, *places[2:], *sizes),
        )  # fmt: skip
        kernels[1].launch(
            (min(items, num_multiprocessors(q.device)), 1, 1),
            (
                q, attention.sink, panels.codes, panels.scale, attention.frequencies, window_rows, ring, *found,
                batch.positions, groups, items, 2 * len(attention.frequencies), num_keys // SHARE_KEYS,
                window_tile // SHARE_KEYS, panels.size // attention.num_groups,
            ),
        )  # fmt: skip
        return attended
    out = torch.empty_like(q)
    shares = torch.empty(num_tokens, heads, num_keys, dtype=torch.bfloat16, device=q.device)
    peaks = torch.empty(num_tokens, num_keys // SHARE_KEYS, heads, device=q.device)
    totals = torch.empty(num_tokens, heads, device=q.device)
    head_tile = min(64, max(16, next_power_of_2(heads)))
    tile = max(64, next_power_of_2(dim))
    shape = heads, dim, window, span, window_tile, head_tile, tile, NARROW, SHARE_KEYS
    grid = num_tokens, cdiv(heads, head_tile)  # only the first may pass 65,535
    share_kernel[grid](
        q, attention.sink, shares, peaks, totals, dim**-0.5, num_keys, num_keys, *places, *shape,
        num_warps=SHARE_WARPS, num_stages=1,
    )  # fmt: skip
    value_kernel[grid](
        shares, peaks, totals, out, num_keys, num_keys, *places, *shape, VALUE_KEYS, num_warps=8, num_stages=1
    )
    rotate_heads(out, batch.positions, attention.frequencies, backwards=True)
    return out


def store_window(window_rows: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` window rows into its slot's ring."""
    write_ring(ring, window_rows, batch)
