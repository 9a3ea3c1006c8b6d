"""Compressed vectors and index keys of a KV source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm, rms_norm
from deepinfer.backends.cuda.hopper.numbers import (
    INVERSE_FP4_MAX,
    bf16_rounded,
    e2m1_code,
    e4m3_bytes,
    exponent_above,
    from_e4m3_bytes,
    power,
    to_bf16,
)
from deepinfer.backends.cuda.hopper.rings import write_ring
from deepinfer.backends.cuda.hopper.rope import rotated_tail
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import CompressorWeights


@dataclass(frozen=True)
class Compressor:
    """Weights of one KV source; `rows` is wkv [D, H], above ratio 1 with wgate below it [2 * D, H]."""

    rows: Matrix
    norm: Norm
    index_wk: Matrix
    index_norm: Norm
    ratio: int
    frequencies: Tensor


def prepare_compressor(compressor: CompressorWeights) -> Compressor:
    """Key and score rows become one product."""
    require(
        (compressor.wgate is not None) == (compressor.ratio > 1),
        f"a compressor of ratio {compressor.ratio} has wgate only above ratio 1",
    )
    parts = (compressor.wkv,) if compressor.wgate is None else (compressor.wkv, compressor.wgate)
    return Compressor(
        rows=prepare_matrix(*parts, dtype=torch.float32),
        norm=prepare_norm(compressor.norm),
        index_wk=prepare_matrix(compressor.index_wk),
        index_norm=prepare_norm(compressor.index_norm),
        ratio=compressor.ratio,
        frequencies=rope_frequencies(compressor.rope, compressor.wkv.value.device),
    )


@triton.jit
def e2m1_bytes(groups, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Scaled values [GROUPS, SIZE] -> [GROUPS, SIZE / 2] uint8 of two codes, the even column low."""
    low, high = tl.split(tl.reshape(e2m1_code(groups), [GROUPS, SIZE // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def page_place(positions, rows, table, table_columns, num_blocks, token, RATIO: tl.constexpr, per_block):
    """Block (0: nothing to write) and place in it of the group that the token completes, and the group."""
    position, row = tl.load(positions + token), tl.load(rows + token)
    group = position // RATIO
    column = group // per_block
    block = tl.load(table + row.to(tl.int64) * table_columns + column, mask=column < table_columns, other=0)
    is_written = (position % RATIO == RATIO - 1) & (block > 0) & (block < num_blocks)
    return tl.where(is_written, block, 0).to(tl.int64), (group % per_block).to(tl.int64), group


@triton.jit
def member_at(rows, state, token, position, back, start, slot, length, slot_stride, WIDTH: tl.constexpr):
    """Where key and score of the position `back` before the token's lie: in this step's rows or in the state ring."""
    place = position - back
    new_at = rows + (token - back) * (2 * WIDTH)
    old_at = state + slot * slot_stride + (place % length).to(tl.int64) * (2 * WIDTH)
    return tl.where(place >= start, new_at, old_at)


@triton.jit
def compress_kernel(
    rows, state, positions, token_rows, row_starts, row_slots, table, norm, eps, frequencies, latent, pages,
    length, slot_stride, num_slots, page_stride, num_blocks, per_block, table_columns,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token: if it completes a group, its latent [WIDTH] bf16 and the packed vector in its page."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    block, place, group = page_place(positions, token_rows, table, table_columns, num_blocks, token, RATIO, per_block)
    column = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)[None, :]
    is_here = column < WIDTH
    if block == 0:  # the product that follows takes every token
        tl.store(latent + token * WIDTH + column, tl.zeros([PAIRS, 2], tl.bfloat16), mask=is_here)
    else:
        if RATIO == 1:
            pooled = tl.load(rows + token * WIDTH + column, mask=is_here, other=0.0)
        else:
            row, position = tl.load(token_rows + token), tl.load(positions + token)
            start, slot = tl.load(row_starts + row), tl.load(row_slots + row)
            slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0).to(tl.int64)
            peak = tl.full([PAIRS, 2], float("-inf"), tl.float32)
            for back in tl.static_range(RATIO):
                at = member_at(rows, state, token, position, back, start, slot, length, slot_stride, WIDTH)
                peak = tl.maximum(peak, tl.load(at + WIDTH + column, mask=is_here, other=0.0))
            total = tl.zeros([PAIRS, 2], tl.float32)
            pooled = tl.zeros([PAIRS, 2], tl.float32)
            for back in tl.static_range(RATIO):
                at = member_at(rows, state, token, position, back, start, slot, length, slot_stride, WIDTH)
                share = tl.exp(tl.load(at + WIDTH + column, mask=is_here, other=0.0) - peak)
                total += share
                pooled += share * tl.load(at + column, mask=is_here, other=0.0)
            pooled = pooled / total
        weight = tl.load(norm + column, mask=is_here, other=0.0)
        value = rms_norm(bf16_rounded(pooled), weight, WIDTH, eps)
        tl.store(latent + token * WIDTH + column, to_bf16(value), mask=is_here)
        value = rotated_tail(value, group * RATIO, frequencies, WIDTH, ROPE, PAIRS)
        groups = tl.reshape(value, [PAIRS // 8, 16])
        peak = tl.maximum(tl.max(tl.abs(groups), 1), 0.01171875)
        factor = e4m3_bytes(tl.minimum(tl.div_rn(peak, 6.0), 448.0))
        scaled = tl.div_rn(groups, tl.broadcast_to(from_e4m3_bytes(factor)[:, None], [PAIRS // 8, 16]))
        page = pages + block * page_stride + place * (WIDTH // 16 * 9)
        part = tl.arange(0, PAIRS // 8)
        is_part = part < WIDTH // 16
        at = page + part[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(at, e2m1_bytes(scaled, PAIRS // 8, 16), mask=is_part[:, None])
        tl.store(page + WIDTH // 2 + part, factor, mask=is_part)


@triton.jit
def packed_index(values, GROUPS: tl.constexpr):
    """[GROUPS, 32] float32 -> bytes [GROUPS, 16] of e2m1 codes and exponent bytes [GROUPS]."""
    peak = tl.maximum(tl.max(tl.abs(values), 1), 7.052966104933725e-38)
    exponent = exponent_above(peak * INVERSE_FP4_MAX)
    scaled = values * power(254 - tl.minimum(exponent, 253))[:, None]
    return e2m1_bytes(scaled, GROUPS, 32), exponent.to(tl.uint8)


@triton.jit
def index_key_kernel(
    keys, positions, token_rows, table, norm, eps, frequencies, pages,
    page_stride, num_blocks, per_block, table_columns,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token: if it completes a group, the group's packed index key in its page."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    block, place, group = page_place(positions, token_rows, table, table_columns, num_blocks, token, RATIO, per_block)
    if block > 0:
        column = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)[None, :]
        is_here = column < WIDTH
        key = tl.load(keys + token * WIDTH + column, mask=is_here, other=0.0).to(tl.float32)
        key = rms_norm(key, tl.load(norm + column, mask=is_here, other=0.0), WIDTH, eps)
        key = rotated_tail(key, group * RATIO, frequencies, WIDTH, ROPE, PAIRS)
        codes, exponents = packed_index(tl.reshape(key, [PAIRS // 16, 32]), PAIRS // 16)
        page = pages + block * page_stride + place * (WIDTH // 32 * 17)
        part = tl.arange(0, PAIRS // 16)
        is_part = part < WIDTH // 32
        tl.store(page + part[:, None] * 16 + tl.arange(0, 16)[None, :], codes, mask=is_part[:, None])
        tl.store(page + WIDTH // 2 + part, exponents, mask=is_part)


def compress(
    x: Tensor,
    batch: TokenBatch,
    compressor: Compressor,
    state: Tensor | None,
    pages: Tensor,
    index_pages: Tensor,
) -> None:
    """Write the compressed vectors and index keys of the groups that x [T, H] bf16 completes, then the state."""
    ratio, dim, index_dim = compressor.ratio, len(compressor.norm.weight), len(compressor.index_norm.weight)
    per_block, num_tokens = batch.block_tokens // ratio, batch.num_tokens
    expect("x", x, (num_tokens, None), torch.bfloat16)
    expect("compressed pages", pages, (None, per_block, dim // 16 * 9), torch.uint8)
    expect("index pages", index_pages, (None, per_block, index_dim // 32 * 17), torch.uint8)
    rows = linear(x, compressor.rows)
    if state is None:
        require(ratio == 1, f"a compressor of ratio {ratio} needs its state ring")
        length, slot_stride, num_slots, ring = 1, 0, 0, rows
    else:
        expect("compressor state", state, (None, None, 2, dim), torch.float32)
        length, slot_stride, num_slots, ring = state.shape[1], state.stride(0), state.shape[0], state
        require(length >= ratio - 1, f"the state ring holds {length} positions; it must hold {ratio - 1}")
    if not num_tokens:
        return
    table, rope = batch.block_table.contiguous(), 2 * len(compressor.frequencies)
    latent = torch.empty(num_tokens, dim, dtype=torch.bfloat16, device=x.device)
    compress_kernel[(num_tokens,)](
        rows, ring, batch.positions, batch.rows, batch.row_starts, batch.row_slots, table, compressor.norm.weight,
        compressor.norm.eps, compressor.frequencies, latent, pages, length, slot_stride, num_slots, pages.stride(0),
        pages.shape[0], per_block, table.shape[1], ratio, dim, rope, next_power_of_2(dim) // 2,
        num_warps=4, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
    keys = linear(latent, compressor.index_wk)
    index_key_kernel[(num_tokens,)](
        keys, batch.positions, batch.rows, table, compressor.index_norm.weight, compressor.index_norm.eps,
        compressor.frequencies, index_pages, index_pages.stride(0), index_pages.shape[0], per_block, table.shape[1],
        ratio, index_dim, rope, next_power_of_2(index_dim) // 2, num_warps=1, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
    if state is not None and ratio > 1:
        write_ring(state, rows.unflatten(-1, (2, dim)), batch)
