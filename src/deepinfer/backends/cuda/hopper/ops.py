"""The Hopper set of ops, ready for `ops.table.build` over the reference.

Activations are bf16 between ops, with the roundings of the released reference; caches hold the
same bytes as on a CPU. Token reads stay the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.backends.cuda.hopper import (
    attention,
    compressor,
    draft,
    embedding,
    engram,
    hyper,
    indexer,
    moe,
    ngrams,
    projections,
    sample,
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
    moe.run_experts,
    ngrams.prepare_ngrams,
    ngrams.ngram_rows,
    engram.prepare_engram,
    engram.engram,
    draft.tap,
    draft.prepare_draft,
    draft.draft_main,
    draft.draft_head,
    draft.draft_next,
    draft.draft_likeliest,
    tokens.store_tokens,
    tokens.verify,
    sample.best_tokens,
    sample.best_logprobs,
    sample.draw,
)


def hopper_ops() -> dict[str, Callable[..., Any]]:
    """Every Hopper op by name."""
    return {function.__name__: function for function in FUNCTIONS}
