"""The indexer: which compressed entries each token attends to.

Everything here works on tiles: a decode step scores each token against its own row's keys, a
prompt chunk scores many tokens against keys that are unpacked once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.linear import Linear, linear, prepare_linear
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.rope import batch_rotation, rope_frequencies, rotate
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Selection
from deepinfer.ops.weights import IndexerWeights

TILE_BYTES = 64 << 20  # keys, products or scores that are held at a time, each


@dataclass(frozen=True)
class Indexer:
    """Index-query weights of one index source."""

    wq_b: Linear
    weights_proj: Linear
    frequencies: Tensor
    num_heads: int
    dim: int
    top_k: int
    ratio: int
    keeps_candidates: bool
    candidate_blocks: int
    candidate_size: int


@dataclass(frozen=True)
class Tile:
    """Tokens first .. last - 1, scored against entries 0 .. num_entries - 1 of `key_rows` [n].

    Each token has its own key row (n tokens), or all share one (n = 1).
    """

    first: int
    last: int
    key_rows: Tensor
    num_entries: int


def prepare_indexer(numerics: Numerics, indexer: IndexerWeights) -> Indexer:
    """Widen the weights."""
    rows = indexer.wq_b.value.shape[0]
    heads = indexer.num_heads
    require(rows % heads == 0, f"index wq_b has {rows} rows; it must be a multiple of its {heads} heads")
    return Indexer(
        wq_b=prepare_linear(numerics, indexer.wq_b),
        weights_proj=prepare_linear(numerics, indexer.weights_proj),
        frequencies=rope_frequencies(indexer.rope, indexer.wq_b.value.device),
        num_heads=indexer.num_heads,
        dim=rows // indexer.num_heads,
        top_k=indexer.top_k,
        ratio=indexer.ratio,
        keeps_candidates=indexer.keeps_candidates,
        candidate_blocks=indexer.candidate_blocks,
        candidate_size=indexer.candidate_size,
    )


def select(
    numerics: Numerics,
    x: Tensor,
    low_rank: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    candidates: Tensor | None,
) -> Selection:
    """The best entries of each token, ascending: n = min(top_k, entries that any token can see) columns.

    When a token's candidates hold fewer than n entries, the lowest of its other visible ones fill
    the rest, as in the released selection.
    """
    num_tokens, num_entries = batch.num_tokens, (batch.max_position + 1) // indexer.ratio
    expect("x", x, (num_tokens, None), torch.float32)
    expect("low-rank query", low_rank, (num_tokens, None), torch.float32)
    expect("index pages", index_pages, (None, batch.block_tokens // indexer.ratio, indexer.dim // 32 * 17), torch.uint8)
    if candidates is not None:
        expect("candidates", candidates, (num_tokens, None))
    num_blocks = -(-num_entries // indexer.candidate_size) if indexer.keeps_candidates else 0
    visible = ((batch.positions + 1) // indexer.ratio).unsqueeze(1)
    if num_entries <= indexer.top_k and num_blocks <= indexer.candidate_blocks:
        return _everything(visible, num_entries, num_blocks, indexer, candidates)

    entries = visible.new_full((num_tokens, min(indexer.top_k, num_entries)), -1)
    kept = visible.new_full((num_tokens, min(indexer.candidate_blocks, num_blocks)), -1)
    q, weights = _queries(numerics, x, low_rank, batch, indexer)
    for tile in _tiles(batch, indexer, num_entries):
        scores = _scores(numerics, q, weights, batch, indexer, index_pages, tile)
        seen, part = visible[tile.first : tile.last], slice(tile.first, tile.last)
        scores.masked_fill_(torch.arange(tile.num_entries, device=x.device) >= seen, -torch.inf)
        if indexer.keeps_candidates:
            blocks = _best_blocks(scores, seen, indexer)
            kept[part, : blocks.shape[1]] = blocks
        elif candidates is not None:
            scores.masked_fill_(~_inside(candidates[part], tile.num_entries, indexer.candidate_size), -torch.inf)
        chosen = top_entries(scores, min(indexer.top_k, tile.num_entries)).sort(-1).values
        entries[part, : chosen.shape[1]] = torch.where(chosen < seen, chosen, -1)
    return Selection(entries, kept if indexer.keeps_candidates else candidates)


def top_entries(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` best scores of each row, in no order; equal scores go to the lower column.

    scores [rows, n] float32, n < 2**31. Sorted by one integer key: the score's bits, made to order
    like the score (-0 counts as 0), above the negated column; so no two keys are equal and the
    answer does not rest on how topk treats ties.
    """
    width = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.long() * 2**32 + torch.arange(width - 1, -1, -1, device=scores.device)
    return key.topk(count, dim=-1, sorted=False).indices


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


def _queries(
    numerics: Numerics, x: Tensor, low_rank: Tensor, batch: TokenBatch, indexer: Indexer
) -> tuple[Tensor, Tensor]:
    """Rotated and fp4-rounded index queries [T, heads, d], head weights [T, heads]."""
    q = linear(numerics, low_rank, indexer.wq_b).unflatten(-1, (indexer.num_heads, indexer.dim))
    turn = batch_rotation(batch, indexer.frequencies)
    q = numerics.act(rotate(q, turn))
    weights = linear(numerics, x, indexer.weights_proj) * (indexer.dim**-0.5 * indexer.num_heads**-0.5)
    return numerics.act(quant.unpack_index(quant.pack_index(q))), weights


def _tiles(batch: TokenBatch, indexer: Indexer, num_entries: int) -> Iterator[Tile]:
    if batch.num_tokens <= len(batch.row_slots):  # about one token a row
        step = max(1, TILE_BYTES // (num_entries * 8))
        for first in range(0, batch.num_tokens, step):
            last = min(first + step, batch.num_tokens)
            yield Tile(first, last, batch.rows[first:last], num_entries)
        return
    offsets, starts = batch.row_offsets.tolist(), batch.row_starts.tolist()
    for row, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        in_row = (starts[row] + end - begin) // indexer.ratio
        if begin == end or in_row == 0:
            continue
        step = max(1, TILE_BYTES // (in_row * 8))
        for first in range(begin, end, step):
            last = min(first + step, end)
            yield Tile(first, last, batch.rows[first : first + 1], in_row)


def _scores(
    numerics: Numerics,
    q: Tensor,
    weights: Tensor,
    batch: TokenBatch,
    indexer: Indexer,
    index_pages: Tensor,
    tile: Tile,
) -> Tensor:
    """Index scores [t, entries] float32 of one tile, some blocks of keys at a time."""
    shared = len(tile.key_rows) == 1
    q, weights = q[tile.first : tile.last], weights[tile.first : tile.last]
    if shared:
        q, weights = q.unsqueeze(0), weights.unsqueeze(0)  # [1, t, heads, d]
    else:
        q, weights = q.unsqueeze(1), weights.unsqueeze(1)  # [t, 1, heads, d]
    per_block, size = index_pages.shape[1], numerics.accumulate.itemsize
    per_entry = max(len(tile.key_rows) * indexer.dim, q.shape[0] * q.shape[1] * indexer.num_heads) * size
    step = max(1, TILE_BYTES // (per_entry * per_block))
    scores = []
    for column in range(0, -(-tile.num_entries // per_block), step):
        blocks = batch.block_table[tile.key_rows, column : column + step]
        keys = index_pages[blocks].flatten(1, 2)[:, : tile.num_entries - column * per_block]
        scores.append(_head_sums(numerics, q, weights, quant.unpack_index(keys)))
    return torch.cat(scores, dim=-1).flatten(0, 1)


def _head_sums(numerics: Numerics, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of weight * relu(q . key): q [n, t, heads, d], keys [n, entries, d] -> [n, t, entries] float32."""
    kind = numerics.accumulate
    dots = torch.bmm(q.flatten(1, 2).to(kind), keys.to(kind).mT).float().unflatten(1, q.shape[1:3])
    if numerics.fuses:
        return torch.matmul(weights.unsqueeze(-2), dots.relu_()).squeeze(-2)
    if not numerics.index_scores:
        return (dots.relu_() * weights.unsqueeze(-1)).sum(2)
    products = numerics.act(numerics.act(dots).relu_() * numerics.act(weights).unsqueeze(-1))
    return numerics.act(products.sum(2))


def _best_blocks(scores: Tensor, visible: Tensor, indexer: Indexer) -> Tensor:
    """Candidate blocks of each token, ascending, -1 where there are fewer: [t, c].

    A block counts by its best entry; the block of the newest visible entry is always kept.
    """
    size = indexer.candidate_size
    best = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    block = torch.arange(best.shape[1], device=scores.device)
    newest = torch.div(visible - 1, size, rounding_mode="floor")
    best.masked_fill_(block == newest, torch.inf)
    chosen = top_entries(best, min(indexer.candidate_blocks, best.shape[1])).sort(-1).values
    return _left_packed(chosen, best.gather(-1, chosen) > -torch.inf)


def _left_packed(values: Tensor, keep: Tensor) -> Tensor:
    """The kept values of each ascending row moved to the left, -1 behind them."""
    past = torch.iinfo(values.dtype).max
    packed = values.masked_fill(~keep, past).sort(-1).values
    return packed.masked_fill_(packed == past, -1)


def _inside(candidates: Tensor, num_entries: int, size: int) -> Tensor:
    """Which entries lie in the candidate blocks: [t, entries] bool."""
    num_blocks = -(-num_entries // size)
    keep = torch.zeros(len(candidates), num_blocks + 1, dtype=torch.bool, device=candidates.device)
    keep.scatter_(1, torch.where(candidates < 0, num_blocks, candidates).long(), True)
    return keep[:, :-1].repeat_interleave(size, dim=1)[:, :num_entries]
