"""Attention over the window and the selected compressed entries of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.linear import Linear, linear, prepare_linear
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.rings import write_ring
from deepinfer.ops.reference.rope import batch_rotation, rope_frequencies, rotate, rotation
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import AttentionWeights

TILE_BYTES = 64 << 20  # gathered keys of the tokens that are worked on at a time
SOFTMAX_BLOCK = 64  # slots that the released kernel folds in at a time


@dataclass(frozen=True)
class Attention:
    """Attention of one layer; wo_a [groups, out_rank, h * D / groups] in the accumulation dtype, sink [h] float32."""

    down: Linear  # wq_a above wkv, [q_rank + D, H]
    q_norm: Norm
    wq_b: Linear
    kv_norm: Norm
    sink: Tensor
    wo_a: Tensor
    wo_b: Linear
    frequencies: Tensor
    num_heads: int
    window: int

    @property
    def dim(self) -> int:
        return self.kv_norm.weight.shape[0]


def prepare_attention(numerics: Numerics, attention: AttentionWeights) -> Attention:
    """Widen the weights; the two products on x become one."""
    wo_a = quant.dequantise(attention.wo_a, numerics.accumulate)
    return Attention(
        down=prepare_linear(numerics, attention.wq_a, attention.wkv),
        q_norm=prepare_norm(attention.q_norm),
        wq_b=prepare_linear(numerics, attention.wq_b),
        kv_norm=prepare_norm(attention.kv_norm),
        sink=attention.sink.value.float(),
        wo_a=wo_a.unflatten(0, (attention.num_groups, -1)),
        wo_b=prepare_linear(numerics, attention.wo_b),
        frequencies=rope_frequencies(attention.rope, wo_a.device),
        num_heads=attention.num_heads,
        window=attention.window,
    )


def attention_inputs(
    numerics: Numerics, x: Tensor, positions: Tensor, attention: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank query [T, q_rank], rotated query [T, h, D], packed window rows [T, bytes] of x [T, H]."""
    expect("x", x, (None, None), torch.float32)
    expect("positions", positions, (x.shape[0],))
    low, kv = linear(numerics, x, attention.down).split([attention.q_norm.weight.shape[0], attention.dim], dim=-1)
    low_rank = rms_norm(numerics, low, attention.q_norm)
    q = linear(numerics, low_rank, attention.wq_b).unflatten(-1, (attention.num_heads, attention.dim))
    kv = rms_norm(numerics, kv, attention.kv_norm)
    both = torch.cat([q, kv.unsqueeze(1)], dim=1)  # one rotation for all heads and the window vector
    both = numerics.act(rotate(both, rotation(positions, attention.frequencies)))
    return low_rank, both[:, :-1], quant.pack_window(both[:, -1])


def main_rows(numerics: Numerics, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Packed window rows [T, bytes] of x [T, H]."""
    expect("x", x, (None, None), torch.float32)
    expect("positions", positions, (x.shape[0],))
    kv = linear(numerics, x, attention.down)[:, attention.q_norm.weight.shape[0] :]
    kv = rms_norm(numerics, kv, attention.kv_norm)
    return quant.pack_window(numerics.act(rotate(kv, rotation(positions, attention.frequencies))))


def attend(
    numerics: Numerics,
    q: Tensor,
    window_rows: Tensor,
    batch: TokenBatch,
    ring: Tensor,
    pages: Tensor | None,
    entries: Tensor | None,
    attention: Attention,
) -> Tensor:
    """Softmax over window, entries and sink, then the inverse rotation: [T, h, D] float32."""
    num_tokens, window = batch.num_tokens, attention.window
    expect("q", q, (num_tokens, attention.num_heads, attention.dim), torch.float32)
    expect("window rows", window_rows, (num_tokens, attention.dim // 32 * 33), torch.uint8)
    expect("window ring", ring, (None, None, window_rows.shape[1]), torch.uint8)
    require(ring.shape[1] >= window - 1, f"the window ring holds {ring.shape[1]} positions; it must hold {window - 1}")
    require((pages is None) == (entries is None), "pages and entries are given together or not at all")
    if pages is not None and entries is not None:
        expect("compressed pages", pages, (None, None, attention.dim // 16 * 9), torch.uint8)
        expect("entries", entries, (num_tokens, None))
    width = window + (0 if entries is None else entries.shape[1])
    tile = max(1, TILE_BYTES // (width * attention.dim * q.itemsize))
    mix = _softmax if numerics.fuses else _folded_softmax
    parts = []
    for first in range(0, num_tokens, tile):
        last = min(first + tile, num_tokens)
        keys, hidden = _window_keys(window_rows, batch, ring, window, first, last)
        if pages is not None and entries is not None and entries.shape[1]:
            more, none = _entry_keys(batch, pages, entries, first, last)
            keys, hidden = torch.cat([keys, more], 1), torch.cat([hidden, none], 1)
        parts.append(mix(numerics, q[first:last], keys, hidden, attention.sink))
    result = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else q
    turn = batch_rotation(batch, attention.frequencies)
    return numerics.act(rotate(result, turn, backwards=True))


def store_window(numerics: Numerics, window_rows: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` window rows into its slot's ring."""
    write_ring(ring, window_rows, batch)


def project_out(numerics: Numerics, attended: Tensor, attention: Attention) -> Tensor:
    """wo_a per group of heads, its input never rounded to fp8, then wo_b: [T, h, D] -> [T, H] float32."""
    expect("attended", attended, (None, attention.num_heads, attention.dim), torch.float32)
    num_groups, _, width = attention.wo_a.shape
    groups = attended.reshape(-1, num_groups, width).transpose(0, 1)
    low_rank = torch.bmm(groups.to(numerics.accumulate), attention.wo_a.mT).transpose(0, 1).flatten(1)
    return linear(numerics, numerics.act(low_rank), attention.wo_b)


@dataclass(frozen=True)
class Places:
    """Where a tile of tokens finds its window vectors; the same for all layers of one window.

    slots: [rows] int64 of the tile's rows. begin, end: the tokens of the step that are needed.
    index: [t * n] int64 into a zero vector, the rows' rings and this step's tokens from `begin` on.
    hidden: [t, n] bool, places without a vector.
    """

    slots: Tensor
    begin: int
    end: int
    index: Tensor
    hidden: Tensor


def _window_keys(
    window_rows: Tensor, batch: TokenBatch, ring: Tensor, window: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Window vectors of tokens first .. last - 1, oldest first: [t, n, D] float32, and which are empty [t, n].

    Every vector is unpacked once, a zero vector for the empty places at the head:

        0 | ring of the tile's first row | ... | ring of its last row | this step's rows
    """
    length = ring.shape[1]
    key = ("window places", window, length, first, last)
    places = batch.once(key, lambda: _window_places(batch, window, length, first, last))
    history = ring.index_select(0, places.slots).flatten(0, 1)
    empty = window_rows.new_zeros(1, ring.shape[2])
    vectors = quant.unpack_window(torch.cat([empty, history, window_rows[places.begin : places.end]]))
    return vectors.index_select(0, places.index).unflatten(0, places.hidden.shape), places.hidden


def _window_places(batch: TokenBatch, window: int, length: int, first: int, last: int) -> Places:
    is_whole = first == 0 and last == batch.num_tokens
    low, high = (0, len(batch.row_slots)) if is_whole else (int(batch.rows[first]), int(batch.rows[last - 1]) + 1)
    rows, newest = batch.rows[first:last].long(), batch.positions[first:last].long().unsqueeze(1)
    if batch.is_block:
        begin, end = (int(batch.row_offsets[row]) for row in (low, high))
        starts = batch.row_starts[rows].long().unsqueeze(1)
        oldest, newest = starts - window, starts + batch.row_offsets.diff()[rows].unsqueeze(1) - 1
        width = window + end - begin
    else:
        begin, end, oldest, width = max(0, first - window + 1), last, newest - (window - 1), window
    oldest = torch.maximum(oldest, batch.window_starts[rows].unsqueeze(1))
    seen = oldest + torch.arange(min(width, batch.max_position + 1), device=rows.device)
    ahead = seen - batch.row_starts[rows].unsqueeze(1)  # negative: in the ring
    in_ring = (rows - low).unsqueeze(1) * length + seen % length + 1
    in_step = ahead + batch.row_offsets[rows].unsqueeze(1) + ((high - low) * length - begin + 1)
    hidden = seen > newest
    index = torch.where(ahead < 0, in_ring, in_step).masked_fill_(hidden, 0).flatten()
    return Places(batch.row_slots[low:high].long(), begin, end, index, hidden)


def _entry_keys(batch: TokenBatch, pages: Tensor, entries: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Compressed vectors of tokens first .. last - 1: [t, n, D] float32, and which are empty [t, n]."""
    per_block = pages.shape[1]
    blocks, places, is_valid = batch.latest(
        ("entry places", first, last), entries, per_block, lambda: _entry_places(batch, entries, per_block, first, last)
    )
    return quant.unpack_compressed(pages[blocks, places], is_valid), ~is_valid


def _entry_places(
    batch: TokenBatch, entries: Tensor, per_block: int, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, places in them and validity of the entries of tokens first .. last - 1, each [t, n]."""
    chosen = entries[first:last]
    is_valid = chosen >= 0
    chosen = chosen.clamp_min(0).long()
    blocks = batch.block_table[batch.rows[first:last].unsqueeze(1), chosen // per_block].long()
    return blocks, chosen % per_block, is_valid


def _softmax(numerics: Numerics, q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor) -> Tensor:
    """One pass: q [t, h, D], keys [t, n, D], hidden [t, n], sink [h] -> [t, h, D]."""
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
    scores = torch.baddbmm(bias, q, keys.mT, alpha=q.shape[-1] ** -0.5)
    scores = torch.cat([scores, sink.view(1, -1, 1).expand(len(q), -1, 1)], dim=-1)
    return torch.bmm(scores.softmax(-1)[..., :-1], keys)


def _folded_softmax(numerics: Numerics, q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor) -> Tensor:
    """The same in blocks of 64 slots, each share rounded as an activation against the running peak."""
    peak = q.new_full(q.shape[:2], -1e30)
    total, result = torch.zeros_like(peak), torch.zeros_like(q)
    for first in range(0, keys.shape[1], SOFTMAX_BLOCK):
        part = keys[:, first : first + SOFTMAX_BLOCK]
        scores = torch.bmm(q, part.mT) * q.shape[-1] ** -0.5
        scores = scores.masked_fill_(hidden[:, first : first + SOFTMAX_BLOCK].unsqueeze(1), -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        decay = torch.exp(peak - new_peak)
        share = torch.exp(scores - new_peak.unsqueeze(-1))
        total = total * decay + share.sum(-1)
        result = result * decay.unsqueeze(-1) + torch.bmm(numerics.act(share), part)
        peak = new_peak
    total = total + torch.exp(sink - peak)
    return numerics.act(result / total.unsqueeze(-1))
