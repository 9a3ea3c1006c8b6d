"""Which work of the device is recorded as a graph, which is replayed, and which graphs are dropped.

Recording costs a few times what running the same kernels one by one costs, and every graph takes memory. So work is
recorded only when its shape has come several times, and what was used longest ago goes first. A shape that was
dropped counts from zero again: however a load changes, recording stays a bounded share of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

from deepinfer import log

logger = log.get(__name__)
RIPE = 4  # times that a shape comes until it is recorded
MAX_GRAPHS = 96
Value = TypeVar("Value")


class Recorder(Protocol):
    """Turns calls into graphs, which share memory: a result is valid until the next graph runs."""

    @property
    def num_bytes(self) -> int:
        """Memory of all graphs since `reset`."""
        ...

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """What queues the kernels of a call; they read and write the same memory each time.

        Raises torch.OutOfMemoryError where the device has too little left; work can go on after it.
        """
        ...

    def reset(self) -> None:
        """Give the memory back; all graphs are dropped already."""
        ...


class CudaRecorder:
    """CUDA graphs in a memory pool of their own."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._num_bytes = 0
        self._stream = torch.cuda.Stream()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()  # compiles what it needs
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        before = torch.cuda.memory_reserved()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):  # `torch.cuda.graph` would also wait and empty the allocator's cache
            graph.capture_begin(self._pool, "thread_local")
            try:
                call()
            finally:
                graph.capture_end()
        outside.wait_stream(self._stream)
        self._num_bytes += torch.cuda.memory_reserved() - before
        return graph.replay

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._pool, self._num_bytes = torch.cuda.graph_pool_handle(), 0


class GraphCache:
    """Recorded work by its shape, bounded in number and memory."""

    def __init__(self, recorder: Recorder, max_bytes: int, max_graphs: int = MAX_GRAPHS) -> None:
        self.recorder = recorder
        self._max_bytes, self._max_graphs = max_bytes, max_graphs
        self._seen: Counter[Hashable] = Counter()
        self._found: dict[Hashable, Any] = {}  # what was used last comes last
        self._too_large: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, shape: Hashable, record: Callable[[], Value]) -> Value | None:
        """What `record` gave for this shape; None where the work is to be run without a graph.

        shape: equal ones are always recorded alike.
        """
        found: Value | None = self._found.pop(shape, None)
        if found is None:
            if not self._is_ripe(shape):
                return None
            try:
                found = record()
                fits = self.recorder.num_bytes <= self._max_bytes
            except torch.OutOfMemoryError:
                fits = False
            if not fits:  # not in the handler: the error holds on to memory
                found = None
                self._drop_all(shape)
                return None
            if len(self._found) >= self._max_graphs:
                del self._found[next(iter(self._found))]
        self._found[shape] = found
        return found

    def _is_ripe(self, shape: Hashable) -> bool:
        if shape in self._too_large:
            return False
        self._seen[shape] += 1
        if self._seen[shape] < RIPE:
            return False
        del self._seen[shape]
        return True

    def _drop_all(self, newest: Hashable) -> None:
        """Graphs share memory, so one of them gives none back; a shape that is too large alone is never tried again."""
        if not self._found:
            self._too_large.add(newest)
        logger.info(
            "graphs hold more than %.1f MiB, or than the device has left; all %d are dropped",
            self._max_bytes / 2**20, len(self._found) + 1,
        )  # fmt: skip
        self._found.clear()
        self.recorder.reset()
