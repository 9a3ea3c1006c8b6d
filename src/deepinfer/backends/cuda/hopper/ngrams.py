"""Rows of the engram tables: hashes of the n-grams that end at each token, all of them in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import engram as reference
from deepinfer.ops.reference.engram import Ngrams
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import NgramSpec

TILE = 32  # tokens


def prepare_ngrams(spec: NgramSpec) -> Ngrams:
    """Lay out the hash constants beside the token map."""
    return reference.prepare_ngrams(Numerics.of("fast"), spec)


@triton.jit
def ngram_kernel(
    tokens, ring, positions, token_rows, row_starts, row_slots, token_map, multipliers, primes, first_rows, out,
    num_tokens, length, slot_stride, image_token, pad, num_ids,
    SPAN: tl.constexpr, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some tokens in one layer's table; from the newest token backwards each product joins the hash of the others.

    An id that the token map does not hold counts as the pad id, and the map is not read there.
    """
    begin()
    layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, HEAD_TILE)
    is_token, is_head = token < num_tokens, head < HEADS
    row = tl.load(token_rows + token, mask=is_token, other=0)
    position = tl.load(positions + token, mask=is_token, other=0)
    start, slot = tl.load(row_starts + row), tl.load(row_slots + row).to(tl.int64)
    hashed, is_blocked = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int32) > 0
    for back in tl.static_range(SPAN):
        place = position - back
        is_here = is_token & (place >= 0)
        is_new = place >= start
        new = tl.load(tokens + token - back, mask=is_here & is_new, other=0)
        at = ring + slot * slot_stride + tl.maximum(place, 0) % length
        ids = tl.where(is_new, new, tl.load(at, mask=is_here & (place < start), other=0).to(tl.int64))
        is_blocked = is_blocked | (place < 0) | (ids == image_token)
        gram = tl.load(token_map + ids, mask=~is_blocked & (ids >= 0) & (ids < num_ids), other=pad)
        hashed = hashed ^ (gram * tl.load(multipliers + layer * SPAN + back))
        if back > 0:
            of_size = (layer * (SPAN - 1) + back - 1) * HEADS + head
            prime = tl.load(primes + of_size, mask=is_head, other=1)
            first = tl.load(first_rows + of_size, mask=is_head, other=0)
            line = ((layer * num_tokens + token) * (SPAN - 1) + back - 1) * HEADS
            found = hashed[:, None] % prime[None, :] + first[None, :]
            tl.store(out + line[:, None] + head[None, :], found, mask=is_token[:, None] & is_head[None, :])


def ngram_rows(tokens: Tensor, batch: TokenBatch, ring: Tensor, ngrams: Ngrams) -> Tensor:
    """Table rows of the n-grams that end at each token [T] int64: [layers, T, columns] int64.

    ring [slots, length] int32, read for positions before the row's start.
    """
    expect("tokens", tokens, (batch.num_tokens,), torch.int64)
    expect("token ring", ring, (None, None), torch.int32)
    num_tokens, (layers, _, sizes, heads) = batch.num_tokens, ngrams.primes.shape
    require(ring.shape[1] >= sizes, f"the token ring holds {ring.shape[1]} tokens; it must hold {sizes}")
    out = torch.empty(layers, num_tokens, sizes * heads, dtype=torch.int64, device=tokens.device)
    if num_tokens:
        ngram_kernel[(cdiv(num_tokens, TILE), layers)](
            tokens.contiguous(), ring, batch.positions, batch.rows, batch.row_starts, batch.row_slots,
            ngrams.token_map, ngrams.multipliers, ngrams.primes, ngrams.first_rows, out,
            num_tokens, ring.shape[1], ring.stride(0), ngrams.image_token, ngrams.pad, len(ngrams.token_map),
            sizes + 1, heads, next_power_of_2(heads), TILE, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out
