"""The model configuration: a Hugging Face config.json of `deepseek_v41`, checked and typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deepinfer.cache.groups import block_tokens_for
from deepinfer.images.geometry import ImageGeometry
from deepinfer.model.section import Section, read_json
from deepinfer.model.v41.parts import GROUP, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, DraftConfig, EngramConfig, VisionConfig
from deepinfer.model.v41.schedule import LayerPlan, cut_layers, plan_layers
from deepinfer.ops.weights import RopeSpec

__all__ = ["ARCHITECTURE", "DraftConfig", "EngramConfig", "LayerPlan", "ModelConfig", "VisionConfig"]

ARCHITECTURE = "DeepseekV41ForCausalLM"


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine knows of a model before it reads a weight.

    Built by `from_file` or `from_mapping`, which refuse with ModelError what cannot be run.
    """

    layers: tuple[LayerPlan, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int  # longest sequence, in tokens
    norm_eps: float

    num_heads: int
    head_dim: int
    q_rank: int
    out_rank: int  # per group
    num_groups: int  # of heads, in the output projection
    window: int  # tokens
    window_rope: RopeSpec  # of layers with ratio 0
    compressed_rope: RopeSpec  # of layers with a ratio > 0

    num_index_heads: int  # 0 when no layer selects, as the other index sizes
    index_dim: int
    index_top_k: int
    candidate_blocks: int  # 0 without a candidate source
    candidate_size: int  # entries per candidate block

    num_streams: int  # residual streams
    num_sinkhorn_iterations: int
    hyper_eps: float

    num_experts: int
    num_active_experts: int
    expert_size: int  # inner width of one expert
    swiglu_limit: float  # 0 = none
    scoring: str  # sqrtsoftplus, softmax or sigmoid
    normalize_shares: bool
    routed_scaling: float
    gate_temp: float

    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    image_id: int  # -1 = none

    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """From a config.json or the folder that holds it. Raises ModelError."""
        path = Path(path)
        return cls.from_mapping(read_json(path / "config.json" if path.is_dir() else path))

    @classmethod
    def from_mapping(cls, values: object) -> ModelConfig:
        """From the content of a config.json. Raises ModelError."""
        return _parse(Section(values))

    def cut(self, layer_ids: Sequence[int]) -> ModelConfig:
        """The same model with only these layers of the checkpoint, renumbered.

        Engram tables go with their layers, the draft head with any of its target layers,
        the image encoder with any layer.
        Raises ConfigError as `schedule.cut_layers` does.
        """
        layers = cut_layers(self.layers, layer_ids)
        places = {layer.layer_id: layer.index for layer in layers}
        engram, draft = self.engram, self.draft
        if engram is not None:
            tables = tuple(table for table in engram.tables if table.layer_id in places)
            engram = dataclasses.replace(engram, tables=tables) if tables else None
        if draft is not None:
            targets = [self.layers[target].layer_id for target in draft.target_layers]
            kept = tuple(places[target] for target in targets if target in places)
            draft = dataclasses.replace(draft, target_layers=kept) if len(kept) == len(targets) else None
        vision = self.vision if len(layers) == len(self.layers) else None
        return dataclasses.replace(self, layers=layers, engram=engram, draft=draft, vision=vision)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rope_dim(self) -> int:
        return self.window_rope.dim

    @property
    def ratios(self) -> tuple[int, ...]:
        return tuple(layer.ratio for layer in self.layers)

    @cached_property
    def boundary(self) -> int:
        """Index of the last KV source, where the decoder half begins; num_layers without one."""
        return max((layer.index for layer in self.layers if layer.owns_kv), default=self.num_layers)

    @cached_property
    def block_tokens(self) -> int:
        """Tokens per cache block."""
        return block_tokens_for(self.ratios)

    @property
    def num_drafts(self) -> int:
        """Tokens that the draft head makes at a time; 0 without one."""
        return self.draft.block_size if self.draft is not None else 0

    @cached_property
    def draft_layers(self) -> tuple[LayerPlan, ...]:
        """The blocks of the draft head, numbered on from the last layer."""
        num_blocks = self.draft.num_stages if self.draft is not None else 0
        return tuple(
            LayerPlan(self.num_layers + block, block, 0, "draft", None, None, True, None, False, False)
            for block in range(num_blocks)
        )

    @property
    def images(self) -> ImageGeometry | None:
        """How images are prepared for this model; None if it takes none."""
        vision = self.vision
        if vision is None:
            return None
        return ImageGeometry(
            patch_size=vision.patch_size,
            merge=vision.merge,
            max_tokens=vision.max_image_tokens,
            min_pixels=vision.min_pixels,
            max_aspect=vision.max_aspect,
            token_id=self.image_id,
            bytes_per_token=4 * self.hidden_size,  # float32
        )

    def rope(self, ratio: int) -> RopeSpec:
        """The rotary embedding of a layer with this ratio."""
        return self.compressed_rope if ratio else self.window_rope


def _parse(root: Section) -> ModelConfig:
    """Read and check a whole config.json. Raises ModelError naming key, value and rule."""
    _check_kind(root)
    text = root.section("text_config")
    _check_fixed(text)
    vocab_size = text.integer("vocab_size", 2)
    hidden_size = text.multiple("hidden_size", GROUP, MAX_WIDTH)
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_stages = text.integer("num_nextn_predict_layers", 0, MAX_LAYERS, default=0)
    layers = plan_layers(text, num_layers, num_stages)
    selects = any(layer.index_source is not None for layer in layers)
    has_candidates = any(layer.keeps_candidates for layer in layers)
    num_experts = text.integer("n_routed_experts", 1, MAX_EXPERTS)
    window_rope, compressed_rope = _ropes(text)
    vision = VisionConfig.parse(root)
    config = ModelConfig(
        layers=layers,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=text.integer("max_position_embeddings", 2),
        norm_eps=text.number("rms_norm_eps", 0.0, 1.0),
        num_heads=text.integer("num_attention_heads", 1, MAX_WIDTH),
        head_dim=text.multiple("head_dim", GROUP, MAX_WIDTH),
        q_rank=text.multiple("q_lora_rank", GROUP, MAX_WIDTH),
        out_rank=text.integer("o_lora_rank", 1, MAX_WIDTH),
        num_groups=text.integer("o_groups", 1, MAX_WIDTH),
        window=text.integer("sliding_window", 1, MAX_WIDTH),
        window_rope=window_rope,
        compressed_rope=compressed_rope,
        num_index_heads=text.integer("index_n_heads", 1, MAX_WIDTH) if selects else 0,
        index_dim=text.multiple("index_head_dim", GROUP, MAX_WIDTH) if selects else 0,
        index_top_k=text.integer("index_topk") if selects else 0,
        candidate_blocks=text.integer("candidate_topk_blocks") if has_candidates else 0,
        candidate_size=text.integer("candidate_block_size") if has_candidates else 0,
        num_streams=text.integer("hc_mult", 1, 64),
        num_sinkhorn_iterations=text.integer("hc_sinkhorn_iters", 1, 1000),
        hyper_eps=text.number("hc_eps", 0.0, 1.0),
        num_experts=num_experts,
        num_active_experts=text.integer("num_experts_per_tok", 1, num_experts),
        expert_size=text.multiple("moe_intermediate_size", GROUP, MAX_WIDTH),
        swiglu_limit=text.number("swiglu_limit", 0.0, 1e30, default=0.0),
        scoring=text.choice("scoring_func", ("sqrtsoftplus", "softmax", "sigmoid")),
        normalize_shares=text.boolean("norm_topk_prob", default=True),
        routed_scaling=text.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        gate_temp=text.number("gate_temp", 1e-6, 1e6, default=1.0),
        bos_id=root.integer("bos_token_id", 0, vocab_size - 1) if root.has("bos_token_id") else None,
        eos_ids=_eos_ids(root, vocab_size),
        pad_id=root.integer("pad_token_id", 0, vocab_size - 1) if root.has("pad_token_id") else None,
        image_id=root.integer("image_token_id", 0 if vision else -1, vocab_size - 1, default=None if vision else -1),
        engram=EngramConfig.parse(text, vocab_size),
        draft=DraftConfig.parse(text, vocab_size, num_layers, num_stages),
        vision=vision,
    )
    _check_attention(text, config)
    return config


def _check_kind(root: Section) -> None:
    if ARCHITECTURE not in root.texts("architectures"):
        root.refuse("architectures", f"this engine runs {ARCHITECTURE}")
    root.choice("model_type", ("deepseek_v41",))
    formats = root.section("quantization_config")
    formats.choice("quant_method", ("fp8",))
    formats.choice("activation_scheme", ("dynamic",), default="dynamic")
    formats.choice("scale_fmt", ("ue8m0",))
    formats.choice("expert_dtype", ("fp4",))
    if formats.integers("weight_block_size", 1, MAX_WIDTH) != (GROUP, GROUP):
        formats.refuse("weight_block_size", f"this engine runs [{GROUP}, {GROUP}]")


def _check_fixed(text: Section) -> None:
    """Keys that could name another function than the one this engine computes."""
    text.choice("model_type", ("deepseek_v41_text",), default="deepseek_v41_text")
    text.choice("hidden_act", ("silu",))
    text.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    text.integer("num_key_value_heads", 1, 1)
    text.integer("n_shared_experts", 1, 1)
    for key in ("attention_bias", "tie_word_embeddings"):
        if text.boolean(key, default=False):
            text.refuse(key, "this engine runs models where it is false")


def _check_attention(text: Section, config: ModelConfig) -> None:
    if config.num_heads % config.num_groups:
        text.refuse("num_attention_heads", f"it must be a multiple of o_groups ({config.num_groups})")
    if config.num_groups * config.out_rank % GROUP:
        text.refuse("o_lora_rank", f"o_groups ({config.num_groups}) x o_lora_rank must be a multiple of {GROUP}")
    if config.rope_dim > config.head_dim or config.rope_dim > (config.index_dim or config.head_dim):
        text.refuse("qk_rope_head_dim", "it must be at most head_dim and at most index_head_dim")
    if config.index_dim and config.candidate_blocks * config.candidate_size >= 2**31:
        text.refuse("candidate_topk_blocks", "candidate_topk_blocks x candidate_block_size must be below 2147483648")


def _ropes(text: Section) -> tuple[RopeSpec, RopeSpec]:
    dim = text.integer("qk_rope_head_dim", 2, MAX_WIDTH)
    if dim % 2:
        text.refuse("qk_rope_head_dim", "it must be even, since elements rotate in pairs")
    window = RopeSpec(dim, text.number("rope_theta", 1.0001, 1e15))
    theta = text.number("compress_rope_theta", 1.0001, 1e15)
    if not text.has("rope_scaling"):
        return window, RopeSpec(dim, theta)
    scaling = text.section("rope_scaling")
    kind = scaling.choice("rope_type", ("yarn", "default"))
    trained = scaling.integer("original_max_position_embeddings", 0, default=0)
    if kind == "default" or not trained:
        return window, RopeSpec(dim, theta)
    slow = scaling.number("beta_slow", 1e-6, 1e6, default=1.0)
    fast = scaling.number("beta_fast", slow, 1e6, default=32.0)
    factor = scaling.number("factor", 1.0, 1e6)
    return window, RopeSpec(dim, theta, factor, fast, slow, trained)


def _eos_ids(root: Section, vocab_size: int) -> tuple[int, ...]:
    if not root.is_list("eos_token_id"):
        return (root.integer("eos_token_id", 0, vocab_size - 1),)
    return root.integers("eos_token_id", 0, vocab_size - 1)
