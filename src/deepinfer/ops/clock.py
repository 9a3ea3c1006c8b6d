"""The time that each op takes: a table of ops with a clock around every one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.ops.table import Ops, one_by_one

GROUPS = {
    "embedding": ("embed",),
    "n-grams and engram": ("ngram_rows", "engram"),
    "hyper-connections": ("hyper_enter", "hyper_leave", "hyper_next"),
    "attention": ("attention_inputs", "main_rows", "attend", "store_window", "project_out"),
    "compressed entries": ("compress", "select"),
    "experts": ("route", "experts", "shared_expert"),
    "head": ("head",),
    "draft head": ("tap", "draft_main", "draft_head", "draft_next", "draft_likeliest"),
    "images": ("embed_patches", "vision_block", "align"),
    "sampling": ("best_tokens", "best_logprobs", "draw", "verify"),
    "tokens and tables": ("store_tokens", "read_tokens", "write_tokens", "read_table"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class OpClock:
    """Collects seconds of ops, each from its first work to its last; does so while `is_on`.

    On a CUDA device two events around each op take the time, and the host waits for them when it asks. So it works in
    a captured step too: its times are those of the last replay. What was collected is changed under a lock: images are
    encoded by a thread of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on, self._is_cuda = True, device.type == "cuda"
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)  # by op
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, ops: Ops) -> Ops:
        """The same ops behind the clock, layers as calls of single ops."""
        timed = one_by_one(ops)
        for name in GROUP_OF:
            setattr(timed, name, (self._between_events if self._is_cuda else self._timed)(name, getattr(timed, name)))
        timed.clock = self
        return timed

    def take(self) -> dict[str, float]:
        """Seconds by group since the last call."""
        groups: dict[str, float] = defaultdict(float)
        for name, seconds in self.take_ops().items():
            groups[GROUP_OF[name]] += seconds
        return dict(groups)

    def take_ops(self) -> dict[str, float]:
        """Seconds by op since the last call of either."""
        with self._lock:
            seconds, events = self._seconds, self._events
            self._seconds, self._events = defaultdict(float), []
        if events:
            torch.cuda.synchronize()
        for name, begin, end in events:
            seconds[name] += begin.elapsed_time(end) / 1e3
        return dict(seconds)

    def clear(self) -> None:
        """Forget what was collected."""
        with self._lock:
            self._seconds.clear()
            self._events.clear()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            seconds = time.perf_counter() - start
            if self.is_on:
                with self._lock:
                    self._seconds[name] += seconds
            return result

        return timed

    def _between_events(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if not self.is_on:
                return function(*arguments)
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            begin.record()
            result = function(*arguments)
            end.record()
            with self._lock:
                self._events.append((name, begin, end))
            return result

        return timed
