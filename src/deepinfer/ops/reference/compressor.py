"""Compressed vectors and index keys of a KV source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.linear import Linear, linear, multiply, prepare_linear
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.rings import write_ring
from deepinfer.ops.reference.rope import rope_frequencies, rotate, rotation
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import CompressorWeights


@dataclass(frozen=True)
class Compressor:
    """Weights of one KV source; `rows` is wkv [D, H], above ratio 1 with wgate below it [2 * D, H]."""

    rows: Linear
    norm: Norm
    index_wk: Linear
    index_norm: Norm
    ratio: int
    frequencies: Tensor

    @property
    def dim(self) -> int:
        return self.norm.weight.shape[0]


def prepare_compressor(numerics: Numerics, compressor: CompressorWeights) -> Compressor:
    """Widen the weights; key and score rows become one product."""
    require(
        (compressor.wgate is not None) == (compressor.ratio > 1),
        f"a compressor of ratio {compressor.ratio} has wgate only above ratio 1",
    )
    parts = (compressor.wkv,) if compressor.wgate is None else (compressor.wkv, compressor.wgate)
    return Compressor(
        rows=prepare_linear(numerics, *parts),
        norm=prepare_norm(compressor.norm),
        index_wk=prepare_linear(numerics, compressor.index_wk),
        index_norm=prepare_norm(compressor.index_norm),
        ratio=compressor.ratio,
        frequencies=rope_frequencies(compressor.rope, compressor.wkv.value.device),
    )


def compress(
    numerics: Numerics,
    x: Tensor,
    batch: TokenBatch,
    compressor: Compressor,
    state: Tensor | None,
    pages: Tensor,
    index_pages: Tensor,
) -> None:
    """Write the compressed vectors and index keys of the groups that x [T, H] completes, then the state."""
    ratio, dim = compressor.ratio, compressor.dim
    expect("x", x, (batch.num_tokens, None), torch.float32)
    expect("compressed pages", pages, (None, batch.block_tokens // ratio, dim // 16 * 9), torch.uint8)
    index_bytes = compressor.index_norm.weight.shape[0] // 32 * 17
    expect("index pages", index_pages, (None, batch.block_tokens // ratio, index_bytes), torch.uint8)
    blocks = batch.block_table[batch.rows, batch.positions // batch.block_tokens]
    is_written = blocks > 0  # block 0 is padding
    if ratio == 1:
        ending = is_written.nonzero().squeeze(1)
        pooled = linear(numerics, x[ending], compressor.rows)
    else:
        require(state is not None, f"a compressor of ratio {ratio} needs its state ring")
        assert state is not None
        expect("compressor state", state, (None, None, 2, dim), torch.float32)
        length = state.shape[1]
        require(length >= ratio - 1, f"the state ring holds {length} positions; it must hold {ratio - 1}")
        rows = multiply(numerics, x, compressor.rows).unflatten(-1, (2, dim))
        ending = (is_written & (batch.positions % ratio == ratio - 1)).nonzero().squeeze(1)
        pooled = _pool(numerics, rows, ending, batch, ratio, state) if len(ending) else rows[:0, 0]
        write_ring(state, rows, batch)
    if len(ending) == 0:
        return
    group = batch.positions[ending] // ratio
    latent = rms_norm(numerics, pooled, compressor.norm)
    turn = rotation(group * ratio, compressor.frequencies)
    key = rms_norm(numerics, linear(numerics, latent, compressor.index_wk), compressor.index_norm)
    place = (blocks[ending], group % pages.shape[1])
    pages[place] = quant.pack_compressed(numerics.act(rotate(latent, turn)))
    index_pages[place] = quant.pack_index(numerics.act(rotate(key, turn)))


def _pool(numerics: Numerics, rows: Tensor, ending: Tensor, batch: TokenBatch, ratio: int, state: Tensor) -> Tensor:
    """Score-weighted mean of each group that ends at the tokens `ending`: [groups, D] float32.

    rows [T, 2, D]: key and score of this step's tokens; members before the row's start are in the state.
    """
    behind = torch.arange(1 - ratio, 1, device=rows.device)
    positions = batch.positions[ending].unsqueeze(1) + behind  # [groups, ratio]
    owner = batch.rows[ending]
    is_new = positions >= batch.row_starts[owner].unsqueeze(1)
    new = rows[(ending.unsqueeze(1) + behind).clamp_min(0)]
    old = state[batch.row_slots[owner].unsqueeze(1), positions % state.shape[1]]
    key, score = torch.where(is_new[:, :, None, None], new, old).unbind(2)
    return numerics.act((key * score.softmax(1)).sum(1))
