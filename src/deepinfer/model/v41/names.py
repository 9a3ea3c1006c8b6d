"""The tensor catalogue: name, dtype and shape of every tensor in the official layout.

`X.weight` with `X.scale` beside it is quantised: e4m3 with a scale per 32x32 tile, e4m3 tables and
packed e2m1 with a scale per row and 32 columns. The gains are those of random weights that keep
activations healthy; a matrix with gain g has elements of deviation g / sqrt(columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.checkpoint.tensors import CODE_RMS, Dtype, TensorSpec
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.parts import GROUP, DraftConfig, VisionConfig
from deepinfer.model.v41.schedule import LayerPlan

PARTS = (
    "embedding",
    "head",
    "attention",
    "compressor",  # and index keys
    "indexer",  # its queries
    "hyper-connections",
    "router",
    "experts",
    "shared expert",
    "engram projection",
    "engram tables",
    "norms and biases",
    "draft experts",
    "draft",
    "vision",
)


def layer_name(layer: LayerPlan) -> str:
    """Prefix of a layer's tensors; the checkpoint counts its own layers and draft blocks."""
    return f"mtp.{layer.layer_id}" if layer.role == "draft" else f"layers.{layer.layer_id}"


def catalogue(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a model, backbone, draft head and image encoder."""
    top = _Part("embedding")
    yield top.bf16("embed.weight", config.vocab_size, config.hidden_size, std=1.0)
    for layer in config.layers:
        yield from _layer(layer, config)
    yield top.norm("norm", config.hidden_size)
    yield from _Part("head").linear("head", config.vocab_size, config.hidden_size, 2.5)
    if config.draft is not None:
        yield from _draft(config, config.draft)
    if config.vision is not None:
        yield from _vision(config.vision, config.hidden_size)


@dataclass(frozen=True)
class _Part:
    """Makes the specs of one part of one layer."""

    part: str
    layer: int | None = None
    small: str = "norms and biases"  # the part that its vectors count to

    def bf16(self, name: str, *shape: int, std: float, mean: float = 0.0) -> TensorSpec:
        return TensorSpec(name, "BF16", shape, self.part, self.layer, std, mean)

    def f32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> TensorSpec:
        part = self.part if len(shape) > 1 else self.small
        return TensorSpec(name, "F32", shape, part, self.layer, std, mean)

    def norm(self, name: str, size: int) -> TensorSpec:
        return TensorSpec(f"{name}.weight", "BF16", (size,), self.small, self.layer, 0.1, 1.0)

    def linear(self, name: str, rows: int, columns: int, gain: float, bias: bool = False) -> Iterator[TensorSpec]:
        yield self.bf16(f"{name}.weight", rows, columns, std=gain * columns**-0.5)
        if bias:
            yield self.bf16(f"{name}.bias", rows, std=0.1)

    def fp8(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Iterator[TensorSpec]:
        tiles = (-(-rows // GROUP), -(-columns // GROUP))
        yield from self._quantised(name, "F8_E4M3", (rows, columns), tiles, gain * columns**-0.5)

    def fp8_table(self, name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        yield from self._quantised(name, "F8_E4M3", (rows, columns), (rows, columns // GROUP), 1.0)

    def fp4(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Iterator[TensorSpec]:
        yield from self._quantised(name, "I8", (rows, columns // 2), (rows, columns // GROUP), gain * columns**-0.5)

    def _quantised(
        self, name: str, dtype: Dtype, shape: tuple[int, int], scales: tuple[int, int], std: float
    ) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{name}.weight", dtype, shape, self.part, self.layer, std)
        yield TensorSpec(f"{name}.scale", "F8_E8M0", scales, self.part, self.layer, std / CODE_RMS[dtype])


def _layer(layer: LayerPlan, config: ModelConfig) -> Iterator[TensorSpec]:
    name, hidden = layer_name(layer), config.hidden_size
    attention = f"{name}.attn"
    yield from _block(name, layer.index, config, config.num_experts)
    if layer.owns_kv:
        compressor = _Part("compressor", layer.index)
        yield from compressor.linear(f"{attention}.compressor.wkv", config.head_dim, hidden, 1.0)
        if layer.ratio > 1:
            yield from compressor.linear(f"{attention}.compressor.wgate", config.head_dim, hidden, 1.5)
        yield compressor.norm(f"{attention}.compressor.norm", config.head_dim)
        yield from compressor.linear(f"{attention}.indexer.wk", config.index_dim, config.head_dim, 1.0)
        yield compressor.norm(f"{attention}.indexer.k_norm", config.index_dim)
    if layer.owns_index:
        indexer = _Part("indexer", layer.index)
        width = config.num_index_heads * config.index_dim
        yield from indexer.fp8(f"{attention}.indexer.wq_b", width, config.q_rank)
        yield from indexer.linear(f"{attention}.indexer.weights_proj", config.num_index_heads, hidden, 1.0)
    if layer.engram is not None and config.engram is not None:
        engram, streams = config.engram, config.num_streams
        num_rows = engram.tables[layer.engram].num_rows
        yield from _Part("engram tables", layer.index).fp8_table(f"{name}.engram.embed", num_rows, engram.head_dim)
        width = engram.num_columns * engram.head_dim
        yield from _Part("engram projection", layer.index).fp8(f"{name}.engram.wkv", (streams + 1) * hidden, width, 0.4)
        for kind in ("q_weight", "k_weight"):
            yield _Part("norms and biases", layer.index).bf16(
                f"{name}.engram.{kind}", streams, hidden, std=0.2, mean=1.0
            )


def _block(name: str, layer: int | None, config: ModelConfig, num_experts: int) -> Iterator[TensorSpec]:
    """An attention half and an expert half: what backbone layers and draft stages have in common."""
    hidden, inner = config.hidden_size, config.expert_size
    heads, dim, groups, out_rank = config.num_heads, config.head_dim, config.num_groups, config.out_rank

    def part(which: str) -> _Part:
        if layer is not None:
            return _Part(which, layer)
        return _Part("draft experts" if which == "experts" else "draft", None, "draft")

    attention, hyper, router = part("attention"), part("hyper-connections"), part("router")
    yield attention.norm(f"{name}.attn_norm", hidden)
    yield attention.norm(f"{name}.ffn_norm", hidden)
    yield from attention.fp8(f"{name}.attn.wq_a", config.q_rank, hidden)
    yield attention.norm(f"{name}.attn.q_norm", config.q_rank)
    yield from attention.fp8(f"{name}.attn.wq_b", heads * dim, config.q_rank, 1.5)
    yield from attention.fp8(f"{name}.attn.wkv", dim, hidden)
    yield attention.norm(f"{name}.attn.kv_norm", dim)
    yield attention.f32(f"{name}.attn.attn_sink", heads, std=1.0)
    yield from attention.fp8(f"{name}.attn.wo_a", groups * out_rank, heads * dim // groups, 1.5)
    yield from attention.fp8(f"{name}.attn.wo_b", hidden, groups * out_rank, 0.25)
    mixes, width = (2 + config.num_streams) * config.num_streams, config.num_streams * hidden
    for half in ("attn", "ffn"):
        yield hyper.f32(f"{name}.hc_{half}_fn", mixes, width, std=width**-0.5)
        yield hyper.f32(f"{name}.hc_{half}_base", mixes, std=0.5)
        yield hyper.f32(f"{name}.hc_{half}_scale", 3, std=0.2, mean=0.8)
    yield from router.linear(f"{name}.ffn.gate", num_experts, hidden, 1.5)
    yield router.f32(f"{name}.ffn.gate.bias", num_experts, std=0.1)
    yield router.f32(f"{name}.ffn.gate.bias_vl", num_experts, std=0.4)
    experts, shared = part("experts"), part("shared expert")
    for expert in range(num_experts):
        yield from experts.fp4(f"{name}.ffn.experts.{expert}.w1", inner, hidden)
        yield from experts.fp4(f"{name}.ffn.experts.{expert}.w2", hidden, inner, 0.3)
        yield from experts.fp4(f"{name}.ffn.experts.{expert}.w3", inner, hidden)
    yield from shared.fp8(f"{name}.ffn.shared_experts.w1", inner, hidden)
    yield from shared.fp8(f"{name}.ffn.shared_experts.w2", hidden, inner, 0.3)
    yield from shared.fp8(f"{name}.ffn.shared_experts.w3", inner, hidden)


def _draft(config: ModelConfig, draft: DraftConfig) -> Iterator[TensorSpec]:
    hidden, part, last = config.hidden_size, _Part("draft", None, "draft"), f"mtp.{draft.num_stages - 1}"
    for block in config.draft_layers:
        yield from _block(layer_name(block), None, config, draft.num_experts)
    yield from part.fp8("mtp.0.main_proj", hidden, len(draft.target_layers) * hidden)
    yield part.norm("mtp.0.main_norm", hidden)
    yield part.norm(f"{last}.norm", hidden)
    yield part.bf16(f"{last}.markov_head.embed.weight", config.vocab_size, draft.markov_rank, std=1.0)
    yield from part.linear(f"{last}.markov_head.head", config.vocab_size, draft.markov_rank, 1.0)
    yield from part.linear(f"{last}.confidence_head.proj", 1, hidden + draft.markov_rank, 2.0)


def _vision(vision: VisionConfig, hidden: int) -> Iterator[TensorSpec]:
    dim, inner, part = vision.hidden_size, vision.inner_size, _Part("vision", None, "vision")
    yield from part.linear("vision.patch_embed.proj", dim, 3 * vision.patch_size**2, 1.5, bias=True)
    for block in range(vision.num_layers):
        name = f"vision.blocks.{block}"
        yield part.norm(f"{name}.norm1", dim)
        yield part.norm(f"{name}.norm2", dim)
        yield from part.linear(f"{name}.attn.wqkv", 3 * dim, dim, 1.5, bias=True)
        yield from part.linear(f"{name}.attn.wo", dim, dim, 1.0, bias=True)
        yield from part.linear(f"{name}.mlp.w1", 2 * inner, dim, 1.0)
        yield from part.linear(f"{name}.mlp.w2", dim, inner, 1.5)
    yield part.norm("vision.norm", dim)
    yield from part.linear("aligner.w1", hidden, dim * vision.merge**2, 1.0, bias=True)
    yield from part.linear("aligner.w2", hidden, hidden, 2.0, bias=True)
    for name in ("image_start", "image_end", "image_newline"):
        yield part.bf16(name, hidden, std=1.0)
