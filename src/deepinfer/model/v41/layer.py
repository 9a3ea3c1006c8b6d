"""One layer: its weights through the prepare ops, and its views into the caches."""

from __future__ import annotations

import torch

from deepinfer.cache.pools import CachePools
from deepinfer.model.v41.config import LayerPlan
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.layers import LayerCaches, LayerParts
from deepinfer.ops.table import Ops


def prepare_layer(plan: LayerPlan, ops: Ops, weights: ModelWeights, tap_place: int | None = None) -> LayerParts:
    """Read a layer's weights and hand them to the ops that pack them. tap_place: see `LayerParts`."""
    index = plan.index
    return LayerParts(
        engram=ops.prepare_engram(weights.engram(index)) if plan.engram is not None else None,
        engram_place=plan.engram or 0,
        tap_place=tap_place,
        attention_hyper=ops.prepare_hyper(weights.hyper(index, "attn"), weights.attention_norm(index)),
        attention=ops.prepare_attention(weights.attention(index)),
        compressor=ops.prepare_compressor(weights.compressor(index)) if plan.owns_kv else None,
        indexer=ops.prepare_indexer(weights.indexer(index)) if plan.owns_index else None,
        expert_hyper=ops.prepare_hyper(weights.hyper(index, "ffn"), weights.ffn_norm(index)),
        router=ops.prepare_router(weights.router(index)),
        experts=ops.prepare_experts(weights.experts(index)),
        shared_expert=ops.prepare_shared_expert(weights.shared_expert(index)),
        reads_entries=plan.ratio > 0,
        keeps_candidates=plan.keeps_candidates,
        uses_candidates=plan.uses_candidates,
    )


def layer_caches(plan: LayerPlan, pools: CachePools) -> LayerCaches:
    """The layer's own ring and state, and the pages of its KV source."""
    pages = index_pages = state = None
    if plan.kv_source is not None:
        pages = pools.rows(f"compressed.{plan.kv_source}")
        index_pages = pools.rows(f"index.{plan.kv_source}")
    if plan.owns_kv and plan.ratio > 1:
        state = pools.numbers(f"state.{plan.index}", torch.float32).unflatten(-1, (2, -1))
    return LayerCaches(pools.rows(f"window.{plan.index}"), pages, index_pages, state)
