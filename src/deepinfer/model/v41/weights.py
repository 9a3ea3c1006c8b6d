"""The weights of a model in its checkpoint's formats, read from a `Source` when asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.tensors import Source
from deepinfer.model.v41.config import ModelConfig, VisionConfig
from deepinfer.model.v41.names import layer_name
from deepinfer.model.v41.ngrams import ngram_spec
from deepinfer.ops.weights import (
    AlignerWeights,
    AttentionWeights,
    BiasedWeight,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    NgramSpec,
    NormWeights,
    PatchWeights,
    RouterWeights,
    VisionBlockWeights,
    Weight,
)

VISION_NORM_EPS = 1e-6


class ModelWeights:
    """Weights by our layer index; nothing is kept, so each is read once, by whoever packs it.

    Blocks of the draft head are numbered on from the last layer.

    folder: where tokenizer.json lies, for the n-gram hashes; None for weights that come without one.
    device: where the tensors are handed over.
    """

    def __init__(
        self, source: Source, config: ModelConfig, folder: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._source, self._config, self._folder, self._device = source, config, folder, device
        self._plans = (*config.layers, *config.draft_layers)

    def embedding(self) -> Weight:
        """[vocab, hidden] bf16."""
        return self._plain("embed.weight")

    def head(self) -> HeadWeights:
        """Final norm and head."""
        return HeadWeights(self._norm("norm"), self._plain("head.weight"))

    def ngrams(self) -> NgramSpec:
        """Hash constants of the engram layers. Raises CheckpointError, see `ngram_spec`."""
        spec = ngram_spec(self._config, self._folder)
        return dataclasses.replace(spec, token_map=spec.token_map.to(self._device))

    def attention_norm(self, layer: int) -> NormWeights:
        """Norm of the attention half's input."""
        return self._norm(f"{self._name(layer)}.attn_norm")

    def ffn_norm(self, layer: int) -> NormWeights:
        """Norm of the expert half's input."""
        return self._norm(f"{self._name(layer)}.ffn_norm")

    def hyper(self, layer: int, half: str) -> HyperWeights:
        """Hyper-connection of a half layer, "attn" or "ffn"."""
        name, config = f"{self._name(layer)}.hc_{half}", self._config
        fn, base, scale = (self._plain(f"{name}_{kind}") for kind in ("fn", "base", "scale"))
        return HyperWeights(fn, base, scale, config.num_sinkhorn_iterations, config.hyper_eps, config.norm_eps)

    def attention(self, layer: int) -> AttentionWeights:
        """Projections and sink of a layer."""
        name, config = f"{self._name(layer)}.attn", self._config
        return AttentionWeights(
            wq_a=self._scaled(f"{name}.wq_a"),
            q_norm=self._norm(f"{name}.q_norm"),
            wq_b=self._scaled(f"{name}.wq_b"),
            wkv=self._scaled(f"{name}.wkv"),
            kv_norm=self._norm(f"{name}.kv_norm"),
            sink=self._plain(f"{name}.attn_sink"),
            wo_a=self._scaled(f"{name}.wo_a"),
            wo_b=self._scaled(f"{name}.wo_b"),
            num_heads=config.num_heads,
            num_groups=config.num_groups,
            window=config.window,
            rope=config.rope(self._plans[layer].ratio),
        )

    def compressor(self, layer: int) -> CompressorWeights:
        """Compressor and index keys of a KV source."""
        name, plan = f"{self._name(layer)}.attn", self._config.layers[layer]
        assert plan.owns_kv, f"layer {layer} is no KV source"
        return CompressorWeights(
            wkv=self._plain(f"{name}.compressor.wkv.weight"),
            wgate=self._plain(f"{name}.compressor.wgate.weight") if plan.ratio > 1 else None,
            norm=self._norm(f"{name}.compressor.norm"),
            index_wk=self._plain(f"{name}.indexer.wk.weight"),
            index_norm=self._norm(f"{name}.indexer.k_norm"),
            ratio=plan.ratio,
            rope=self._config.rope(plan.ratio),
        )

    def indexer(self, layer: int) -> IndexerWeights:
        """Index queries of an index source."""
        name, config, plan = f"{self._name(layer)}.attn.indexer", self._config, self._config.layers[layer]
        assert plan.owns_index, f"layer {layer} is no index source"
        return IndexerWeights(
            wq_b=self._scaled(f"{name}.wq_b"),
            weights_proj=self._plain(f"{name}.weights_proj.weight"),
            num_heads=config.num_index_heads,
            top_k=config.index_top_k,
            ratio=plan.ratio,
            rope=config.rope(plan.ratio),
            keeps_candidates=plan.keeps_candidates,
            candidate_blocks=config.candidate_blocks,
            candidate_size=config.candidate_size,
        )

    def router(self, layer: int) -> RouterWeights:
        """Router of a layer."""
        name, config = f"{self._name(layer)}.ffn.gate", self._config
        return RouterWeights(
            weight=self._plain(f"{name}.weight"),
            bias=self._plain(f"{name}.bias"),
            bias_vl=self._plain(f"{name}.bias_vl"),
            num_active=self._expert_counts(layer)[1],
            scoring=config.scoring,
            normalize=config.normalize_shares,
            scaling=config.routed_scaling,
            temperature=config.gate_temp,
        )

    def experts(self, layer: int) -> ExpertWeights:
        """The routed experts of a layer, stacked."""
        name, num_experts = f"{self._name(layer)}.ffn.experts", self._expert_counts(layer)[0]
        stacked = []
        for matrix in ("w1", "w2", "w3"):
            names = [f"{name}.{expert}.{matrix}" for expert in range(num_experts)]
            value, scale = (self._source.stack([f"{one}.{part}" for one in names]) for part in ("weight", "scale"))
            stacked.append(Weight(value.to(self._device), scale.to(self._device)))
        w1, w2, w3 = stacked
        return ExpertWeights(w1, w2, w3, self._config.swiglu_limit)

    def shared_expert(self, layer: int) -> ExpertWeights:
        """The expert that every token passes."""
        name = f"{self._name(layer)}.ffn.shared_experts"
        w1, w2, w3 = (self._scaled(f"{name}.{matrix}") for matrix in ("w1", "w2", "w3"))
        return ExpertWeights(w1, w2, w3, self._config.swiglu_limit)

    def engram(self, layer: int) -> EngramWeights:
        """Engram of a layer; the table stays in its file until rows of it are read."""
        name = f"{self._name(layer)}.engram"
        return EngramWeights(
            table=self._scaled(f"{name}.embed"),
            wkv=self._scaled(f"{name}.wkv"),
            q_weight=self._plain(f"{name}.q_weight"),
            k_weight=self._plain(f"{name}.k_weight"),
            norm_eps=self._config.norm_eps,
        )

    def draft(self) -> DraftWeights:
        """The draft head but for its blocks."""
        first, last = (layer_name(self._config.draft_layers[block]) for block in (0, -1))
        return DraftWeights(
            main_proj=self._scaled(f"{first}.main_proj"),
            main_norm=self._norm(f"{first}.main_norm"),
            norm=self._norm(f"{last}.norm"),
            markov_embed=self._plain(f"{last}.markov_head.embed.weight"),
            markov_head=self._plain(f"{last}.markov_head.head.weight"),
            confidence=self._plain(f"{last}.confidence_head.proj.weight"),
        )

    def patches(self) -> PatchWeights:
        """The image encoder's first product."""
        return PatchWeights(self._biased("vision.patch_embed.proj"), self._vision.patch_size)

    def vision_block(self, index: int) -> VisionBlockWeights:
        """One layer of the image encoder."""
        name, vision = f"vision.blocks.{index}", self._vision
        return VisionBlockWeights(
            norm1=NormWeights(self._plain(f"{name}.norm1.weight"), VISION_NORM_EPS),
            wqkv=self._biased(f"{name}.attn.wqkv"),
            wo=self._biased(f"{name}.attn.wo"),
            norm2=NormWeights(self._plain(f"{name}.norm2.weight"), VISION_NORM_EPS),
            w1=BiasedWeight(self._plain(f"{name}.mlp.w1.weight"), None),
            w2=BiasedWeight(self._plain(f"{name}.mlp.w2.weight"), None),
            num_heads=vision.num_heads,
            theta=vision.rope_theta,
        )

    def aligner(self) -> AlignerWeights:
        """From the image encoder to the model's width."""
        return AlignerWeights(
            norm=NormWeights(self._plain("vision.norm.weight"), VISION_NORM_EPS),
            w1=self._biased("aligner.w1"),
            w2=self._biased("aligner.w2"),
            merge=self._vision.merge,
        )

    def image_delimiters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Learned vectors [hidden] float32: start of an image, end of a line of cells, end of the image."""
        names = ("image_start", "image_newline", "image_end")
        start, line_end, end = (self._plain(name).value.float() for name in names)
        return start, line_end, end

    @property
    def _vision(self) -> VisionConfig:
        assert self._config.vision is not None, "the model takes no images"
        return self._config.vision

    def _biased(self, name: str) -> BiasedWeight:
        return BiasedWeight(self._plain(f"{name}.weight"), self._plain(f"{name}.bias"))

    def _name(self, layer: int) -> str:
        return layer_name(self._plans[layer])

    def _expert_counts(self, layer: int) -> tuple[int, int]:
        """Routed experts of a layer, and how many of them a token passes."""
        config, draft = self._config, self._config.draft
        if self._plans[layer].role == "draft":
            assert draft is not None
            return draft.num_experts, draft.num_active_experts
        return config.num_experts, config.num_active_experts

    def _plain(self, name: str) -> Weight:
        return Weight(self._source.get(name).to(self._device))

    def _scaled(self, name: str) -> Weight:
        value, scale = (self._source.get(f"{name}.{part}").to(self._device) for part in ("weight", "scale"))
        return Weight(value, scale)

    def _norm(self, name: str) -> NormWeights:
        return NormWeights(self._plain(f"{name}.weight"), self._config.norm_eps)
