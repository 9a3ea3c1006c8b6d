"""The time that each op takes: a table of ops with a clock around every one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.ops.table import Ops, one_by_one

GROUPS = {
    "embedding": ("embed",),
    "n-grams and engram": ("ngram_rows", "engram"),
    "hyper-connections": ("hyper_enter", "hyper_leave"),
    "attention": ("attention_inputs", "main_rows", "attend", "store_window", "project_out"),
    "compressed entries": ("compress", "select"),
    "experts": ("route", "experts", "shared_expert"),
    "head": ("head",),
    "draft head": ("tap", "draft_main", "draft_head", "draft_next"),
    "images": ("embed_patches", "vision_block", "align"),
    "sampling": ("best_tokens", "best_logprobs", "draw"),
    "tokens and tables": ("store_tokens", "read_tokens", "write_tokens", "read_table"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class OpClock:
    """Collects seconds of ops; a device's work is waited for, so nothing overlaps while it is measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)  # by group

    def around(self, ops: Ops) -> Ops:
        """The same ops behind the clock, layers as calls of single ops."""
        timed = one_by_one(ops)
        for name, group in GROUP_OF.items():
            setattr(timed, name, self._timed(group, getattr(timed, name)))
        timed.clock = self
        return timed

    def take(self) -> dict[str, float]:
        """Seconds by group since the last call."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    def _timed(self, group: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._wait()
            start = time.perf_counter()
            result = function(*arguments)
            self._wait()
            self.seconds[group] += time.perf_counter() - start
            return result

        return timed

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
