"""The least time that each op can take on a card: its bytes over bandwidth, or its products over their rate.

Each input and output counts once; products of fp8 and fp4 weights at the rate of fp8, others at that of bf16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.schedule import LayerPlan

BYTES_PER_S, FP8_PER_S, BF16_PER_S = 4.3e12, 1467e12, 802e12  # reached on an H200 by large copies and products


@dataclass(frozen=True)
class Work:
    """Tokens of a step: `num_rows` rows of `num_tokens` / `num_rows` tokens that end at position `end`.

    num_decoded: tokens of the decoder half. num_lines: of the head.
    """

    num_rows: int
    num_tokens: int
    num_decoded: int
    num_lines: int
    end: int

    def entries(self, num_tokens: int, ratio: int, most: int) -> float:
        """Compressed entries that a token sees, at most `most` of them; the mean over a row's last tokens."""
        positions = np.arange(self.end - num_tokens // self.num_rows, self.end)
        return float(np.minimum((positions + 1) // ratio, most).mean())


def floors(config: ModelConfig, work: Work, num_ranks: int) -> dict[str, float]:
    """Seconds of each op, over all layers."""
    found: dict[str, float] = defaultdict(float)
    for layer in config.layers:
        for name, num_bytes, fp8, bf16 in _layer(config, layer, work, num_ranks):
            found[name] += max(num_bytes / BYTES_PER_S, fp8 / FP8_PER_S + bf16 / BF16_PER_S)
    size = config.vocab_size * config.hidden_size
    found["head"] = max(2 * size / BYTES_PER_S, 2.0 * work.num_lines * size / BF16_PER_S)
    return dict(found)


def _layer(
    config: ModelConfig, layer: LayerPlan, work: Work, num_ranks: int
) -> Iterator[tuple[str, float, float, float]]:
    """Op, bytes, fp8 products and bf16 products (two operations each)."""
    hidden, dim, width = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
    every = work.num_tokens
    t = every if layer.index < config.boundary else work.num_decoded
    if config.engram is not None and layer.engram is not None:
        columns = config.engram.num_columns * config.engram.head_dim
        size = (config.num_streams + 1) * hidden * columns
        yield "engram", size + t * (4 * config.num_streams * hidden + columns), 2.0 * t * size, 0
    yield "hyper_next", 4.0 * t * hidden * (2 + 2 * config.num_streams), 0, 0  # as if every half followed another
    down = (config.q_rank + dim) * hidden + width * config.q_rank
    yield "attention_inputs", down + 2.0 * t * (hidden + width), 2.0 * t * down, 0
    entries = work.entries(t, layer.ratio, config.index_top_k) if layer.ratio else 0.0
    keys = entries + min(config.window, work.end)
    yield "attend", t * (3.0 * width + entries * dim * 9 / 16 + config.window * dim), 0, 4.0 * t * width * keys
    out = config.out_rank * width + hidden * config.num_groups * config.out_rank
    yield "project_out", out + t * (2.0 * hidden + width), 2.0 * t * out, 0
    if layer.owns_kv:
        size = (2 if layer.ratio > 1 else 1) * dim * hidden
        yield "compress", 2.0 * size + 2.0 * every * hidden, 0, 2.0 * every * size
    if layer.owns_index:
        most = config.candidate_blocks * config.candidate_size if layer.uses_candidates else work.end
        scored = work.entries(t, layer.ratio, most)
        keys_read = work.num_rows * min(most, work.end / layer.ratio) * config.index_dim * 17 / 32
        products = 2.0 * t * scored * config.num_index_heads * config.index_dim
        yield "select", keys_read + 8.0 * t * scored, products, 0
    size = config.num_experts * hidden
    yield "route", 2.0 * size + 2.0 * t * hidden, 0, 2.0 * t * size
    expert = 3.0 * hidden * config.expert_size
    local = -(-config.num_experts // num_ranks)
    yield "experts", local * expert * 17 / 32 + 6.0 * t * hidden, 2.0 * t * config.num_active_experts * expert, 0
    yield "shared_expert", expert + 8.0 * t * hidden, 2.0 * t * expert, 0
