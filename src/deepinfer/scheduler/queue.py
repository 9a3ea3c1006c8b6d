"""The waiting queue: lower priority number first, in order of arrival inside a priority."""

from __future__ import annotations

import heapq

from deepinfer.errors import QueueFullError
from deepinfer.scheduler.request import Request

_SLACK = 64  # removed entries that may stay in the heap whatever its size


class WaitingQueue:
    """A heap with removal by id: removed entries stay until they reach the top or outnumber the rest."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._waiting: dict[str, Request] = {}
        self._heap: list[tuple[int, int, str]] = []  # priority, sequence, request id

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Queue a new request. Raises QueueFullError when max_queue requests wait already."""
        if len(self._waiting) >= self._max_queue:
            raise QueueFullError(
                f"request {request.request_id!r} is refused: {len(self._waiting)} requests wait already and "
                f"max_queue is {self._max_queue}; try again later or raise --max-queue"
            )
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was accepted before; its place is that of its arrival, full or not."""
        assert request.request_id not in self._waiting, f"request {request.request_id!r} waits already"
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.priority, request.sequence, request.request_id))

    def first(self) -> Request | None:
        """The next request, left in the queue."""
        while self._heap:
            request = self._live(self._heap[0])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def take_first(self) -> Request:
        """Take out the request that `first` shows."""
        request = self.first()
        assert request is not None, "nothing waits"
        heapq.heappop(self._heap)
        return self._waiting.pop(request.request_id)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out wherever it stands; None when it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is not None and len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._heap = [entry for entry in self._heap if self._live(entry) is not None]
            heapq.heapify(self._heap)
        return request

    def _live(self, entry: tuple[int, int, str]) -> Request | None:
        request = self._waiting.get(entry[2])
        return request if request is not None and request.sequence == entry[1] else None
