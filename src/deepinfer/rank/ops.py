"""Ops of a rank that has a part of the experts and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepinfer.ops.table import Ops
from deepinfer.ops.weights import EngramWeights, RouterWeights


@dataclass(frozen=True)
class Share:
    """Prepared weights, and how many experts or table rows they have."""

    prepared: Any
    count: int


def keep_share(ops: Ops, num_ranks: int) -> None:
    """Let the table's ops take any expert or table row for the one at its number modulo those that a rank has."""
    given = {name: getattr(ops, name) for name in ("prepare_router", "route", "prepare_engram", "engram")}

    def prepare_router(router: RouterWeights) -> Share:
        return Share(given["prepare_router"](router), -(-len(router.bias.value) // num_ranks))

    def route(x: Tensor, is_image: Tensor | None, router: Share) -> tuple[Tensor, Tensor]:
        chosen, share = given["route"](x, is_image, router.prepared)
        return chosen % router.count, share

    def prepare_engram(engram: EngramWeights) -> Share:
        return Share(given["prepare_engram"](engram), len(engram.table.value))

    def engram(streams: Tensor, rows: Tensor, is_image: Tensor | None, engram: Share) -> Any:
        return given["engram"](streams, rows % engram.count, is_image, engram.prepared)

    for function in (prepare_router, route, prepare_engram, engram):
        setattr(ops, function.__name__, function)
