"""GrammarQueue: requests whose grammar is being compiled. They wait beside the scheduler and hold up nobody."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from deepinfer.errors import QueueFullError, RequestError
from deepinfer.messages import Finished, FinishReason, GenerateRequest, RequestTimes
from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.server import GrammarServer


class GrammarQueue:
    """In the order in which grammars get ready; not thread-safe, the engine's client calls it under its lock.

    server: None = this engine has no grammars, and a request with one is refused.
    max_waiting: requests; more are refused.
    wake: called in another thread when a grammar is ready or refused.
    """

    def __init__(self, server: GrammarServer | None, wake: Callable[[], None], max_waiting: int) -> None:
        self._server, self._wake, self._max_waiting = server, wake, max_waiting
        self._waiting: dict[str, tuple[GenerateRequest, Future[CompiledGrammar]]] = {}
        # Whose grammar is there; whoever was ended before that may be among them.
        self._ready: dict[tuple[str, Future[CompiledGrammar]], None] = {}
        self._finished: list[Finished] = []

    def add(self, request: GenerateRequest) -> None:
        """Start on a request's grammar. Raises RequestError (QueueFullError when too many wait)."""
        constraint = request.params.constraint
        assert constraint is not None, "a request without a grammar waits for none"
        if self._server is None:
            raise RequestError(
                f"request {request.request_id!r} has a grammar, but this engine runs without model or tokenizer; "
                "leave structured_outputs and so_args out"
            )
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"request {request.request_id!r} is refused: {len(self._waiting)} requests with grammars wait already; "
                "try again later or raise --max-queue"
            )
        future = self._server.compile(constraint.grammar)
        self._waiting[request.request_id] = request, future
        future.add_done_callback(lambda done: self._note_ready(request.request_id, done))

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        """End a request that still waits here; False when none of that id does."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._ready.pop((request_id, waiting[1]), None)
            times = RequestTimes(waiting[0].arrival, None, None, time.monotonic())
            self._finished.append(Finished(request_id, reason, times, error=error))
        return waiting is not None

    def has_work(self) -> bool:
        """Whether `ready` or `take_finished` has something to give."""
        return bool(self._finished or self._ready)

    def ready(self) -> Iterator[GenerateRequest]:
        """Requests with their compiled grammar, left in the queue; those whose grammar was refused end."""
        for request_id, future in [*self._ready]:
            request, awaited = self._waiting.get(request_id, (None, None))
            if request is None or awaited is not future:  # it was ended, and the id may be another's
                del self._ready[request_id, future]
                continue
            try:
                compiled = future.result()
            except RequestError as error:
                self.finish(request.request_id, "error", f"request {request.request_id!r} is refused: {error}")
            else:
                yield dataclasses.replace(request, grammar=compiled)

    def remove(self, request_id: str) -> None:
        """The scheduler has the request now."""
        _, future = self._waiting.pop(request_id)
        del self._ready[request_id, future]

    def _note_ready(self, request_id: str, future: Future[CompiledGrammar]) -> None:
        """In whatever thread compiled the grammar."""
        self._ready[request_id, future] = None
        self._wake()

    def take_finished(self) -> list[Finished]:
        """Ends that were not handed out yet."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """End the helper processes."""
        if self._server is not None:
            self._server.close()
