"""Attention half of one layer: window ring, compressed entries, and who selects them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.pools import CachePools
from deepinfer.model.v41.config import LayerPlan
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.table import Ops, Selection


class AttentionCaches:
    """The cache views of one layer: its own ring, and the pages of its KV source."""

    def __init__(self, plan: LayerPlan, pools: CachePools):
        self.window = pools.rows(f"window.{plan.index}")
        self.pages = self.index_pages = self.state = None
        if plan.kv_source is not None:
            self.pages = pools.rows(f"compressed.{plan.kv_source}")
            self.index_pages = pools.rows(f"index.{plan.kv_source}")
        if plan.owns_kv and plan.ratio > 1:
            self.state = pools.numbers(f"state.{plan.index}", torch.float32).unflatten(-1, (2, -1))


class Attention:
    """Projections, compressor and indexer of one layer, over caches that it does not own."""

    def __init__(self, plan: LayerPlan, ops: Ops, weights: ModelWeights):
        self.plan, self.ops = plan, ops
        self.weights = ops.prepare_attention(weights.attention(plan.index))
        self.compressor = ops.prepare_compressor(weights.compressor(plan.index)) if plan.owns_kv else None
        self.indexer = ops.prepare_indexer(weights.indexer(plan.index)) if plan.owns_index else None

    def store_global(self, x: Tensor, batch: TokenBatch, caches: AttentionCaches) -> None:
        """Write the compressed vectors and index keys of a KV source, for every token of the step."""
        if self.compressor is not None:
            assert caches.pages is not None and caches.index_pages is not None
            self.ops.compress(x, batch, self.compressor, caches.state, caches.pages, caches.index_pages)

    def forward(
        self, x: Tensor, batch: TokenBatch, caches: AttentionCaches, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """x [T, H] -> output [T, H] and the selection that the layers above may reuse."""
        low_rank, q, window_rows = self.ops.attention_inputs(x, batch.positions, self.weights)
        if self.indexer is not None:
            assert caches.index_pages is not None
            given = selection.candidates if selection is not None and self.plan.uses_candidates else None
            found = self.ops.select(x, low_rank, batch, self.indexer, caches.index_pages, given)
            kept = selection.candidates if selection is not None else None
            selection = Selection(found.entries, found.candidates if self.plan.keeps_candidates else kept)
        entries = selection.entries if selection is not None and self.plan.ratio else None
        attended = self.ops.attend(q, window_rows, batch, caches.window, caches.pages, entries, self.weights)
        self.ops.store_window(window_rows, batch, caches.window)
        return self.ops.project_out(attended, self.weights), selection
