"""Which work of the device is recorded as a graph, which is replayed, and which graphs are dropped.

Recording costs a few times what running the same kernels one by one costs, and every graph takes memory. So work is
recorded only when its shape has come several times, and what was used longest ago goes first. A shape that was
dropped counts from zero again: however a load changes, recording stays a bounded share of its time. What cannot be
recorded runs without a graph.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

from deepinfer import log
from deepinfer.backends.cuda.native import BuildError

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
        """What queues the kernels of a call, which was run to its end; they read and write the same memory each time.

        Raises RuntimeError or BuildError where that fails, most often for want of memory; work can go on after it.
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
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):  # `torch.cuda.graph` would also wait and empty the allocator's cache
            try:
                graph.capture_begin(self._pool, "thread_local")
                call()
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                raise
        outside.wait_stream(self._stream)
        outside.synchronize()  # the caller may change what the first call reads of the host
        self._num_bytes = sum(  # of this pool alone: another thread may take memory for images meanwhile
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture wherever it failed: for the stream, and for the allocator, which a broken end forgets."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # the allocator may take the old one as recording still

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
        self._refused: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._found)

    def has(self, shape: Hashable) -> bool:
        """Whether `find` gives what was recorded."""
        return shape in self._found

    def find(self, shape: Hashable, record: Callable[[], Value]) -> Value | None:
        """What `record` gave for this shape; None where the work is to be run without a graph.

        shape: equal ones are always recorded alike.
        """
        found: Value | None = self._found.pop(shape, None)
        if found is None:
            found = self._recorded(shape, record) if self._is_ripe(shape) else None
            if found is None:
                return None
            if len(self._found) >= self._max_graphs:
                del self._found[next(iter(self._found))]
        self._found[shape] = found
        return found

    def _recorded(self, shape: Hashable, record: Callable[[], Value]) -> Value | None:
        """What `record` gives; None where it fails or takes too much, and then no graph is left."""
        found, failure = None, ""
        try:
            found = record()
        except (RuntimeError, BuildError) as error:  # no more is done here, since the error holds on to memory
            failure = str(error).strip().partition("\n")[0] or type(error).__name__
        if found is not None and self.recorder.num_bytes <= self._max_bytes:
            return found
        found = None
        self._drop_all(shape, failure)
        return None

    def _is_ripe(self, shape: Hashable) -> bool:
        if shape in self._refused:
            return False
        self._seen[shape] += 1
        if self._seen[shape] < RIPE:
            return False
        del self._seen[shape]
        return True

    def _drop_all(self, newest: Hashable, failure: str) -> None:
        """Graphs share memory, so one of them gives none back.

        failure: why the newest was not recorded; empty = it was, and is too much. A shape that is too large alone is
        never tried again, nor one that fails for another reason than memory.
        """
        lacks_memory = not failure or "out of memory" in failure
        if not (self._found and lacks_memory):
            self._refused.add(newest)
        if lacks_memory:
            logger.info(
                "graphs hold more than %.1f MiB, or than the device has left; all %d are dropped",
                self._max_bytes / 2**20, len(self._found) + 1,
            )  # fmt: skip
        else:
            log.warn_once(__name__, f"no CUDA graph of a step ({failure}); its kernels are launched one by one")
        self._found.clear()
        self.recorder.reset()
