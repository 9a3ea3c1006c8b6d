"""The native set of ops, ready for `ops.table.build` over the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.backends.cpu import (
    attention,
    compressor,
    draft,
    embedding,
    engram,
    engram_rows,
    hyper,
    indexer,
    layers,
    model,
    moe,
    projections,
    tokens,
)

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    embedding.prepare_embedding,
    embedding.embed,
    embedding.prepare_head,
    embedding.head,
    hyper.prepare_hyper,
    hyper.hyper_enter,
    hyper.hyper_leave,
    hyper.hyper_next,
    projections.prepare_attention,
    projections.attention_inputs,
    projections.main_rows,
    attention.attend,
    attention.store_window,
    projections.project_out,
    compressor.prepare_compressor,
    compressor.compress,
    indexer.prepare_indexer,
    indexer.select,
    moe.prepare_router,
    moe.route,
    moe.prepare_experts,
    moe.experts,
    moe.prepare_shared_expert,
    moe.shared_expert,
    engram_rows.prepare_ngrams,
    engram_rows.ngram_rows,
    engram.prepare_engram,
    engram.engram,
    draft.tap,
    draft.prepare_draft,
    draft.draft_main,
    draft.draft_head,
    draft.draft_next,
    draft.draft_likeliest,
    layers.prepare_layers,
    layers.run_layers,
    model.prepare_model,
    model.run_model,
    tokens.store_tokens,
    tokens.read_tokens,
    tokens.write_tokens,
    tokens.read_table,
    tokens.best_tokens,
    tokens.best_logprobs,
)


def cpu_ops() -> dict[str, Callable[..., Any]]:
    """Every native op by name."""
    return {function.__name__: function for function in FUNCTIONS}
