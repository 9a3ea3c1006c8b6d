"""The native set of ops, ready for `ops.table.build` over the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.backends.cpu import embedding, engram, hyper, moe

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    embedding.prepare_embedding,
    embedding.embed,
    embedding.prepare_head,
    embedding.head,
    hyper.prepare_hyper,
    hyper.hyper_enter,
    hyper.hyper_leave,
    moe.prepare_router,
    moe.route,
    moe.prepare_experts,
    moe.experts,
    moe.prepare_shared_expert,
    moe.shared_expert,
    engram.prepare_engram,
    engram.engram,
)


def cpu_ops() -> dict[str, Callable[..., Any]]:
    """Every native op by name."""
    return {function.__name__: function for function in FUNCTIONS}
