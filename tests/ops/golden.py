"""The golden checkpoint as `ops/weights` dataclasses, the oracle's traces, and a row-wise comparison."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build
from deepinfer.ops.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    NgramSpec,
    NormWeights,
    RopeSpec,
    RouterWeights,
    Weight,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "nano"
CHECKPOINT = GOLDEN / "checkpoint"
TRACES = [(33, "exact"), (33, "float32"), (200, "exact")]  # the float32 trace of 200 tokens holds choices only


@functools.cache
def ops(precision: str) -> Ops:
    return build({"reference": reference_ops(precision)})


@functools.cache
def config() -> dict:
    return json.loads((CHECKPOINT / "config.json").read_text())["text_config"]


@functools.cache
def tensors() -> dict[str, Tensor]:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


@functools.cache
def goldens() -> dict:
    return json.loads((GOLDEN / "goldens" / "goldens.json").read_text())


@functools.cache
def trace(length: int, precision: str) -> dict[str, Tensor]:
    """Intermediates of one prompt; floats as float32, masks as bool."""
    raw = load_file(GOLDEN / "goldens" / f"trace_{length}_{precision}.safetensors")
    kinds = {torch.bfloat16: torch.float32, torch.uint8: torch.bool}
    return {name: value.to(kinds.get(value.dtype, value.dtype)) for name, value in raw.items()}


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Worst relative difference of a row (last dimension), in the euclidean norm."""
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1).clamp_min(1e-30)).max()) if len(actual) else 0.0


def weight(name: str) -> Weight:
    """`name`.weight and its scale, or the bare tensor `name`."""
    known = tensors()
    if name in known:
        return Weight(known[name])
    return Weight(known[f"{name}.weight"], known.get(f"{name}.scale"))


def norm(name: str) -> NormWeights:
    return NormWeights(weight(name), config()["rms_norm_eps"])


def ratio(layer: int) -> int:
    return config()["compress_ratios"][layer]


def rope(layer: int) -> RopeSpec:
    values = config()
    if not ratio(layer):
        return RopeSpec(values["qk_rope_head_dim"], values["rope_theta"])
    scaling = values["rope_scaling"]
    return RopeSpec(
        values["qk_rope_head_dim"],
        values["compress_rope_theta"],
        scaling["factor"],
        scaling["beta_fast"],
        scaling["beta_slow"],
        scaling["original_max_position_embeddings"],
    )


def hyper(layer: int, half: str) -> HyperWeights:
    name, values = f"layers.{layer}.hc_{half}", config()
    parts = (weight(f"{name}_{part}") for part in ("fn", "base", "scale"))
    return HyperWeights(*parts, values["hc_sinkhorn_iters"], values["hc_eps"], values["rms_norm_eps"])


def attention(layer: int) -> AttentionWeights:
    name, values = f"layers.{layer}.attn", config()
    return AttentionWeights(
        wq_a=weight(f"{name}.wq_a"),
        q_norm=norm(f"{name}.q_norm"),
        wq_b=weight(f"{name}.wq_b"),
        wkv=weight(f"{name}.wkv"),
        kv_norm=norm(f"{name}.kv_norm"),
        sink=weight(f"{name}.attn_sink"),
        wo_a=weight(f"{name}.wo_a"),
        wo_b=weight(f"{name}.wo_b"),
        num_heads=values["num_attention_heads"],
        num_groups=values["o_groups"],
        window=values["sliding_window"],
        rope=rope(layer),
    )


def compressor(layer: int) -> CompressorWeights:
    name = f"layers.{layer}.attn"
    return CompressorWeights(
        wkv=weight(f"{name}.compressor.wkv"),
        wgate=weight(f"{name}.compressor.wgate") if ratio(layer) > 1 else None,
        norm=norm(f"{name}.compressor.norm"),
        index_wk=weight(f"{name}.indexer.wk"),
        index_norm=norm(f"{name}.indexer.k_norm"),
        ratio=ratio(layer),
        rope=rope(layer),
    )


def indexer(layer: int) -> IndexerWeights:
    name, values = f"layers.{layer}.attn.indexer", config()
    return IndexerWeights(
        wq_b=weight(f"{name}.wq_b"),
        weights_proj=weight(f"{name}.weights_proj"),
        num_heads=values["index_n_heads"],
        top_k=values["index_topk"],
        ratio=ratio(layer),
        rope=rope(layer),
        keeps_candidates=layer == values["candidate_source_layer_id"],
        candidate_blocks=values["candidate_topk_blocks"],
        candidate_size=values["candidate_block_size"],
    )


def router(layer: int) -> RouterWeights:
    name, values = f"layers.{layer}.ffn.gate", config()
    return RouterWeights(
        weight=weight(name),
        bias=weight(f"{name}.bias"),
        bias_vl=weight(f"{name}.bias_vl"),
        num_active=values["num_experts_per_tok"],
        scoring=values["scoring_func"],
        normalize=values["norm_topk_prob"],
        scaling=values["routed_scaling_factor"],
        temperature=values.get("gate_temp", 1.0),
    )


def experts(layer: int) -> ExpertWeights:
    def stack(part: str) -> Weight:
        names = [f"layers.{layer}.ffn.experts.{e}.{part}" for e in range(config()["n_routed_experts"])]
        return stacked([weight(name) for name in names])

    return ExpertWeights(stack("w1"), stack("w2"), stack("w3"), config()["swiglu_limit"])


def stacked(weights: list[Weight]) -> Weight:
    scales = torch.stack([w.scale.view(torch.uint8) for w in weights]).view(torch.float8_e8m0fnu)
    return Weight(torch.stack([w.value for w in weights]), scales)


def shared_expert(layer: int) -> ExpertWeights:
    parts = (weight(f"layers.{layer}.ffn.shared_experts.{part}") for part in ("w1", "w2", "w3"))
    return ExpertWeights(*parts, config()["swiglu_limit"])


def engram(layer: int) -> EngramWeights:
    name = f"layers.{layer}.engram"
    parts = (weight(f"{name}.{part}") for part in ("embed", "wkv", "q_weight", "k_weight"))
    return EngramWeights(*parts, config()["rms_norm_eps"])


def ngrams(image_token: int = -1) -> NgramSpec:
    facts = goldens()["engram"]
    return NgramSpec(
        token_map=torch.tensor(facts["token_map"]),
        pad=facts["pad_id"],
        multipliers=tuple(tuple(int(value) for value in layer) for layer in facts["multipliers"]),
        primes=tuple(tuple(tuple(heads) for heads in layer) for layer in facts["primes"]),
        image_token=image_token,
    )


def head() -> HeadWeights:
    return HeadWeights(norm("norm"), weight("head"))
