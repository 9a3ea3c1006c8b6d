"""Ops of a rank that has a part of the experts and tables, and a clock around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.table import OP_NAMES, WHOLE_LAYERS, Ops
from deepinfer.ops.weights import EngramWeights, ExpertWeights


@dataclass(frozen=True)
class Share:
    """Prepared weights, and how many experts or table rows they have."""

    prepared: Any
    count: int


def keep_share(ops: Ops) -> None:
    """Let the table's ops take any expert or table row for the one at its number modulo those that are here."""
    prepare_experts, experts = ops.prepare_experts, ops.experts
    prepare_engram, engram = ops.prepare_engram, ops.engram

    def prepare_some(weights: ExpertWeights) -> Share:
        return Share(prepare_experts(weights), len(weights.w1.value))

    def some(x: Tensor, chosen: Tensor, share: Tensor, local: Share) -> Tensor:
        return experts(x, chosen % local.count, share, local.prepared)

    def prepare_rows(weights: EngramWeights) -> Share:
        return Share(prepare_engram(weights), len(weights.table.value))

    def few_rows(streams: Tensor, rows: Tensor, is_image: Tensor | None, local: Share) -> Tensor:
        return engram(streams, rows % local.count, is_image, local.prepared)

    for name, function in (
        ("prepare_experts", prepare_some), ("experts", some), ("prepare_engram", prepare_rows), ("engram", few_rows),
    ):  # fmt: skip
        setattr(ops, name, function)


class EventClock:
    """Seconds of each op between two events on the device; works while a graph is captured too."""

    def __init__(self, ops: Ops) -> None:
        self.is_on = False
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        for name in OP_NAMES:
            if not name.startswith("prepare") and name not in WHOLE_LAYERS:
                setattr(ops, name, self._timed(name, getattr(ops, name)))

    def clear(self) -> None:
        """Forget all calls."""
        self._events.clear()

    def seconds(self) -> dict[str, float]:
        """By op, of the calls so far; a graph's are those of its last replay."""
        torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for name, begin, end in self._events:
            found[name] += begin.elapsed_time(end) / 1e3
        return dict(found)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if not self.is_on:
                return function(*arguments)
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            begin.record()
            result = function(*arguments)
            end.record()
            self._events.append((name, begin, end))
            return result

        return timed
