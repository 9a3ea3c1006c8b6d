"""Weights as a checkpoint holds them, on their way into a `prepare_*` op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that the model config, which needs RopeSpec, is read without loading torch
    from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """One matrix, vector or stack of matrices in its checkpoint format.

    value: bf16 or f32; or float8_e4m3fn with `scale`; or int8 holding two e2m1 codes (the low
        nibble is the even column) with `scale`.
    scale: float8_e8m0fnu or None. For e4m3 matrices one per 32x32 tile; for e2m1 matrices and
        e4m3 tables one per row and 32 columns. A leading expert dimension is allowed in both.
    """

    value: Tensor
    scale: Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scale is not None


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the last `dim` of a vector, adjacent pairs.

    factor is None without YaRN; otherwise the YaRN interpolation (arXiv:2309.00071) without
    attention scaling.
    """

    dim: int
    theta: float
    factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class HyperWeights:
    """Hyper-connection of one half layer: fn [(2 + m) * m, m * hidden], base [(2 + m) * m], scale [3], all float32."""

    fn: Weight
    base: Weight
    scale: Weight
    num_iterations: int
    eps: float
    norm_eps: float


@dataclass(frozen=True)
class NormWeights:
    """RMS norm: weight [width] bf16."""

    weight: Weight
    eps: float


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one layer, see `Ops.attention_inputs`, `Ops.attend`, `Ops.project_out`."""

    wq_a: Weight  # [q_rank, hidden]
    q_norm: NormWeights
    wq_b: Weight  # [heads * dim, q_rank]
    wkv: Weight  # [dim, hidden]
    kv_norm: NormWeights
    sink: Weight  # [heads] float32
    wo_a: Weight  # [groups * out_rank, heads * dim / groups]
    wo_b: Weight  # [hidden, groups * out_rank]
    num_heads: int
    num_groups: int
    window: int
    rope: RopeSpec


@dataclass(frozen=True)
class CompressorWeights:
    """Compressor and index keys of a KV source layer, see `Ops.compress`."""

    wkv: Weight  # [dim, hidden] bf16
    wgate: Weight | None  # [dim, hidden] bf16, ratio > 1 only
    norm: NormWeights
    index_wk: Weight  # [index_dim, dim] bf16
    index_norm: NormWeights
    ratio: int
    rope: RopeSpec


@dataclass(frozen=True)
class IndexerWeights:
    """Index queries of an index source layer, see `Ops.select`.

    candidate_blocks, candidate_size: how many blocks of how many entries a candidate source
        keeps; also what a later layer finds in the candidates it is given.
    keeps_candidates: this layer is the candidate source.
    """

    wq_b: Weight  # [index_heads * index_dim, q_rank]
    weights_proj: Weight  # [index_heads, hidden] bf16
    num_heads: int
    top_k: int
    ratio: int
    rope: RopeSpec
    keeps_candidates: bool
    candidate_blocks: int
    candidate_size: int


@dataclass(frozen=True)
class RouterWeights:
    """Router of one layer, see `Ops.route`."""

    weight: Weight  # [experts, hidden] bf16
    bias: Weight  # [experts] float32, text tokens
    bias_vl: Weight  # [experts] float32, image tokens
    num_active: int
    scoring: str  # "sqrtsoftplus", "softmax" or "sigmoid"
    normalize: bool
    scaling: float
    temperature: float


@dataclass(frozen=True)
class ExpertWeights:
    """Stacked routed experts [experts, ...], or one shared expert without that dimension."""

    w1: Weight  # [(experts,) inner, hidden]
    w2: Weight  # [(experts,) hidden, inner]
    w3: Weight  # [(experts,) inner, hidden]
    limit: float  # clamp of the SwiGLU halves; 0 = none


@dataclass(frozen=True)
class NgramSpec:
    """How n-grams address the engram tables of all engram layers, see `Ops.ngram_rows`.

    token_map: [vocab] int64, token id -> compressed id.  pad: compressed id of the pad token.
    multipliers: [layer][lookback]; primes: [layer][n-gram size - 2][head].
    image_token: id that has no n-grams and blocks the look-back of later tokens; -1 = none.
    """

    token_map: Tensor
    pad: int
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    image_token: int


@dataclass(frozen=True)
class EngramWeights:
    """Engram of one layer, see `Ops.engram`."""

    table: Weight  # [rows, head_dim] e4m3, scale per row and 32
    wkv: Weight  # [(streams + 1) * hidden, columns * head_dim]
    q_weight: Weight  # [streams, hidden] bf16
    k_weight: Weight  # [streams, hidden] bf16
    norm_eps: float


@dataclass(frozen=True)
class DraftWeights:
    """What the draft head has besides its blocks, see `Ops.draft_main`, `Ops.draft_head`, `Ops.draft_next`."""

    main_proj: Weight  # [hidden, taps * hidden]
    main_norm: NormWeights
    norm: NormWeights
    markov_embed: Weight  # [vocab, rank] bf16
    markov_head: Weight  # [vocab, rank] bf16
    confidence: Weight  # [1, hidden + rank] bf16


@dataclass(frozen=True)
class HeadWeights:
    """Final norm and output head: weight [vocab, hidden] bf16, multiplied in float32."""

    norm: NormWeights
    weight: Weight


@dataclass(frozen=True)
class BiasedWeight:
    """A matrix [rows, columns] bf16 and its bias [rows] bf16, None where there is none."""

    weight: Weight
    bias: Weight | None


@dataclass(frozen=True)
class PatchWeights:
    """The image encoder's first product, see `Ops.embed_patches`."""

    linear: BiasedWeight  # [dim, 3 * size * size]
    size: int  # pixels along a patch


@dataclass(frozen=True)
class VisionBlockWeights:
    """One layer of the image encoder, see `Ops.vision_block`."""

    norm1: NormWeights
    wqkv: BiasedWeight  # [3 * dim, dim]
    wo: BiasedWeight  # [dim, dim]
    norm2: NormWeights
    w1: BiasedWeight  # [2 * inner, dim], gate above up
    w2: BiasedWeight  # [dim, inner]
    num_heads: int
    theta: float


@dataclass(frozen=True)
class AlignerWeights:
    """From the image encoder to the model's width, see `Ops.align`."""

    norm: NormWeights
    w1: BiasedWeight  # [hidden, dim * merge * merge]
    w2: BiasedWeight  # [hidden, hidden]
    merge: int
