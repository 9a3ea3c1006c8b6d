"""Configuration of the parts that a model may lack: engram, draft head, image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.model.section import Section

GROUP = 32  # elements that share one scale, in quantised linears and cached vectors
MAX_LAYERS = 512
MAX_WIDTH = 2**20
MAX_EXPERTS = 4096
MAX_ROWS = 2**40


@dataclass(frozen=True)
class EngramTable:
    """One engram table; `position` is its place among those of the checkpoint, which decides its primes."""

    layer_id: int
    position: int
    num_rows: int


@dataclass(frozen=True)
class EngramConfig:
    """The n-gram memory."""

    tables: tuple[EngramTable, ...]  # `LayerPlan.engram` is an index into these
    max_ngram: int  # longest n-gram, in tokens
    vocab_size: int  # the primes start here
    num_heads: int  # rows per n-gram size
    head_dim: int  # width of a row
    pad_id: int  # token id that stands where there is no earlier token
    compressed_vocab_size: int

    @property
    def lookback(self) -> int:
        """Earlier tokens that an n-gram reaches."""
        return self.max_ngram - 1

    @property
    def num_columns(self) -> int:
        """Rows that each token fetches from a table."""
        return self.lookback * self.num_heads

    @classmethod
    def parse(cls, text: Section, vocab_size: int) -> EngramConfig | None:
        """None when no layer has an engram. Raises ModelError."""
        if not text.has("engram_layer_ids") or not (layer_ids := text.integers("engram_layer_ids", 0, MAX_LAYERS)):
            return None
        rows = text.integers("engram_num_embeddings", 1, MAX_ROWS)
        if len(rows) != len(layer_ids):
            text.refuse(
                "engram_num_embeddings", f"it must list one table size for each of {len(layer_ids)} engram layers"
            )
        tables = tuple(EngramTable(layer, place, rows[place]) for place, layer in enumerate(layer_ids))
        return cls(
            tables=tables,
            max_ngram=text.integer("engram_max_ngram_size", 2, 16),
            vocab_size=text.integer("engram_vocab_size", 2),
            num_heads=text.integer("engram_n_heads", 1, 64),
            head_dim=text.multiple("engram_head_dim", GROUP, MAX_WIDTH),
            pad_id=text.integer("engram_pad_token_id", 0, vocab_size - 1),
            compressed_vocab_size=text.integer("engram_compressed_vocab_size", 1, vocab_size),
        )


@dataclass(frozen=True)
class DraftConfig:
    """The DSpark draft head."""

    num_stages: int
    block_size: int  # tokens per draft
    noise_id: int  # token id of the places still to be drafted
    target_layers: tuple[int, ...]  # indexes of the layers whose input it reads
    markov_rank: int
    num_experts: int
    num_active_experts: int

    @classmethod
    def parse(cls, text: Section, vocab_size: int, num_layers: int, num_stages: int) -> DraftConfig | None:
        """None without draft stages. Raises ModelError."""
        if not num_stages:
            return None
        targets = text.ascending("dspark_target_layer_ids", num_layers - 1)
        if not targets:
            text.refuse("dspark_target_layer_ids", "the draft stages need at least one target layer")
        num_experts = text.integer("dspark_n_routed_experts", 1, MAX_EXPERTS)
        return cls(
            num_stages=num_stages,
            block_size=text.integer("dspark_block_size", 1, 1024),
            noise_id=text.integer("dspark_noise_token_id", 0, vocab_size - 1),
            target_layers=targets,
            markov_rank=text.integer("dspark_markov_rank", 1, MAX_WIDTH),
            num_experts=num_experts,
            num_active_experts=text.integer("dspark_num_experts_per_tok", 1, num_experts),
        )


@dataclass(frozen=True)
class VisionConfig:
    """The image encoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    inner_size: int
    patch_size: int  # pixels
    rope_theta: float
    merge: int  # merge x merge patches become one position
    max_image_tokens: int
    min_pixels: int
    max_aspect: float | None  # width / height, None = any

    @classmethod
    def parse(cls, root: Section) -> VisionConfig | None:
        """None when the model reads no images. Raises ModelError."""
        if not root.has("vision_config"):
            return None
        vision = root.section("vision_config")
        if not vision.integer("num_hidden_layers", 0, MAX_LAYERS, default=0):
            return None
        vision.choice("model_type", ("deepseek_v41_vision",), default="deepseek_v41_vision")
        hidden_size = vision.integer("hidden_size", 4, MAX_WIDTH)
        num_heads = vision.integer("num_attention_heads", 1, MAX_WIDTH)
        if hidden_size % (4 * num_heads):
            vision.refuse("hidden_size", f"it must be a multiple of 4 x num_attention_heads ({4 * num_heads})")
        return cls(
            num_layers=vision.integer("num_hidden_layers", 1, MAX_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            inner_size=vision.integer("intermediate_size", 1, MAX_WIDTH),
            patch_size=vision.integer("patch_size", 1, 1024),
            rope_theta=vision.number("rope_theta", 1.0001, 1e15),
            merge=vision.integer("downsample_ratio", 1, 64),
            max_image_tokens=vision.integer("max_image_tokens", 4),
            min_pixels=vision.integer("min_pixels", 0),
            max_aspect=vision.number("max_wh_ratio", 1e-6, 1e6) if vision.has("max_wh_ratio") else None,
        )
