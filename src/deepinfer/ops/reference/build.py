"""The reference set of ops, ready for `ops.table.build`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepinfer.ops.reference import (
    attention,
    compressor,
    draft,
    embedding,
    engram,
    hyper,
    indexer,
    moe,
    sample,
    tokens,
    vision,
)
from deepinfer.ops.reference.numerics import Numerics

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    embedding.prepare_embedding,
    embedding.embed,
    embedding.prepare_head,
    embedding.head,
    hyper.prepare_hyper,
    hyper.hyper_enter,
    hyper.hyper_leave,
    hyper.hyper_next,
    attention.prepare_attention,
    attention.attention_inputs,
    attention.main_rows,
    attention.attend,
    attention.store_window,
    attention.project_out,
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
    engram.prepare_ngrams,
    engram.ngram_rows,
    engram.prepare_engram,
    engram.engram,
    draft.tap,
    draft.prepare_draft,
    draft.draft_main,
    draft.draft_head,
    draft.draft_next,
    draft.draft_likeliest,
    tokens.store_tokens,
    tokens.read_tokens,
    tokens.write_tokens,
    tokens.read_table,
    tokens.verify,
    sample.best_tokens,
    sample.best_logprobs,
    sample.draw,
    vision.prepare_patches,
    vision.embed_patches,
    vision.prepare_vision_block,
    vision.vision_block,
    vision.prepare_aligner,
    vision.align,
)


def reference_ops(precision: str) -> dict[str, Callable[..., Any]]:
    """Every op by name, bound to the numerics of "exact", "float32" or "fast".

    Raises ConfigError for another precision.
    """
    numerics = Numerics.of(precision)
    return {function.__name__: partial(function, numerics) for function in FUNCTIONS}
