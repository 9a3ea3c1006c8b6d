"""Engram: n-gram hashes, and the gated update of the streams from a table of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.linear import Linear, linear, prepare_linear
from deepinfer.ops.reference.norm import rms_scale
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import EngramWeights, NgramSpec, Weight


@dataclass(frozen=True)
class Ngrams:
    """Hash constants, int64: multipliers [layers, 1, span]; primes, first_rows [layers, 1, span - 1, heads]."""

    token_map: Tensor
    pad: int
    image_token: int
    multipliers: Tensor
    primes: Tensor
    first_rows: Tensor


@dataclass(frozen=True)
class Engram:
    """Engram of one layer; the table stays as it is stored. weight = q_weight * k_weight [m, H] float32."""

    table: Weight
    wkv: Linear
    weight: Tensor
    norm_eps: float


def prepare_ngrams(numerics: Numerics, spec: NgramSpec) -> Ngrams:
    """Lay out the hash constants beside the token map."""
    device = spec.token_map.device
    multipliers = torch.tensor(spec.multipliers, dtype=torch.int64, device=device).unsqueeze(1)
    primes = torch.tensor(spec.primes, dtype=torch.int64, device=device)
    ends = primes.flatten(1).cumsum(1).view_as(primes)
    require(multipliers.shape[2] == primes.shape[1] + 1, "an n-gram spec has one multiplier more than n-gram sizes")
    return Ngrams(
        token_map=spec.token_map.long(),
        pad=spec.pad,
        image_token=spec.image_token,
        multipliers=multipliers,
        primes=primes.unsqueeze(1),
        first_rows=(ends - primes).unsqueeze(1),
    )


def ngram_rows(numerics: Numerics, tokens: Tensor, batch: TokenBatch, ring: Tensor, ngrams: Ngrams) -> Tensor:
    """Table rows of the n-grams that end at each token: [layers, T, columns] int64.

    Products of an id and a multiplier stay below 2**63 by the choice of multipliers.
    """
    expect("tokens", tokens, (batch.num_tokens,))
    expect("token ring", ring, (None, None))
    span = ngrams.multipliers.shape[2]
    require(ring.shape[1] >= span - 1, f"the token ring holds {ring.shape[1]} tokens; it must hold {span - 1}")
    gram = _compressed_grams(tokens, batch, ring, ngrams, span)
    rolling = gram * ngrams.multipliers  # [layers, T, span]
    for size in range(1, span):
        rolling[..., size] ^= rolling[..., size - 1]
    return (rolling[..., 1:, None] % ngrams.primes + ngrams.first_rows).flatten(2)


def prepare_engram(numerics: Numerics, engram: EngramWeights) -> Engram:
    """Widen wkv and the norm weights."""
    q, k = (quant.dequantise(weight, torch.float32) for weight in (engram.q_weight, engram.k_weight))
    return Engram(engram.table, prepare_linear(numerics, engram.wkv), q * k, engram.norm_eps)


def engram(numerics: Numerics, streams: Tensor, rows: Tensor, is_image: Tensor | None, engram: Engram) -> Tensor:
    """streams + gate * value: streams [T, m, H] float32, rows [T, columns] int64 -> [T, m, H] float32."""
    num_streams, hidden = engram.weight.shape
    expect("streams", streams, (None, num_streams, hidden), torch.float32)
    expect("engram rows", rows, (streams.shape[0], None))
    memory = linear(numerics, numerics.act(_table_rows(engram.table, rows)).flatten(1), engram.wkv)
    key, value = memory.split([num_streams * hidden, hidden], dim=-1)
    gate = _gate(streams, key.unflatten(-1, (num_streams, hidden)), engram)
    if is_image is not None:
        expect("is_image", is_image, (streams.shape[0],), torch.bool)
        gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
    return numerics.act(streams + gate.unsqueeze(-1) * value.unsqueeze(1))


def _gate(streams: Tensor, key: Tensor, engram: Engram) -> Tensor:
    """sigmoid(signed_sqrt(<norm(stream), norm(key)>, weighted, / sqrt(H))): [T, m] float32."""
    scale = rms_scale(streams, engram.norm_eps) * rms_scale(key, engram.norm_eps)
    dot = (streams * engram.weight * key).sum(-1) * scale.squeeze(-1) * streams.shape[-1] ** -0.5
    return torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt().copysign(dot))


def _table_rows(table: Weight, rows: Tensor) -> Tensor:
    """Rows [T, columns] of the table, widened: [T, columns, head_dim] float32."""
    flat = rows.reshape(-1)
    if table.scale is None:
        return table.value[flat].float().unflatten(0, rows.shape)
    picked = (part.view(torch.uint8)[flat].view(part.dtype) for part in (table.value, table.scale))
    return quant.dequantise(Weight(*picked), torch.float32).unflatten(0, rows.shape)


def _compressed_grams(tokens: Tensor, batch: TokenBatch, ring: Tensor, ngrams: Ngrams, span: int) -> Tensor:
    """Compressed ids of each token and the span - 1 before it, newest first: [T, span] int64.

    From the first place before the sequence or on an image token, the pad id stands in.
    """
    back = torch.arange(span, device=tokens.device)
    index = torch.arange(batch.num_tokens, device=tokens.device).unsqueeze(1) - back
    positions = batch.positions.unsqueeze(1) - back
    slots = batch.row_slots[batch.rows].unsqueeze(1)
    new, old = tokens[index.clamp_min(0)], ring[slots, positions % ring.shape[1]]
    ids = torch.where(positions >= batch.row_starts[batch.rows].unsqueeze(1), new, old).long()
    is_blocked = ((positions < 0) | (ids == ngrams.image_token)).cummax(1).values
    return ngrams.token_map[ids.masked_fill(is_blocked, 0)].masked_fill_(is_blocked, ngrams.pad)
