"""Link: where the requests of all connections meet the engine; everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer import log
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.wire import Command, Finish, Ready, Refused, Steps, Submit
from deepinfer.errors import EngineDeadError, QueueFullError, RequestError
from deepinfer.frontend.images import placeholders
from deepinfer.frontend.known_answers import KnownAnswers
from deepinfer.frontend.outputs import OutputDelta
from deepinfer.frontend.stream import RequestStream
from deepinfer.images.room import PixelRoom
from deepinfer.messages import Finished, FinishReason, StepOutput
from deepinfer.serve.errors import ApiError
from deepinfer.serve.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from deepinfer.serve.traces import Traces

logger = log.get(__name__)

ENGINE_NAME = re.compile(r"^request '[^']*'")  # means nothing to a client


class Exchange:
    """The answers to one HTTP request, as long as they are in the engine. Always `close` it.

    known_as: names under which `/abort` finds it, the last one with the answer's id. trace: of its HTTP request.
    """

    trace: Context | None = None

    def __init__(self, link: Link, streams: Sequence[RequestStream], known_as: tuple[str, ...]) -> None:
        self.streams, self.known_as = streams, known_as
        self.failure: Exception | None = None
        self.is_closed = False
        self.num_open = len(streams)
        self._link = link
        self.news = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> bool:
        """Until something is new; False when nothing was for so long.

        Raises EngineDeadError, ClientLeft, or the refusal of an answer.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        if self.failure is not None:
            raise self.failure
        return True

    async def finished(self) -> None:
        """Until every answer is complete."""
        while self.num_open:
            await self.wait()

    def take(self) -> list[tuple[RequestStream, OutputDelta]]:
        """What is new in each answer."""
        return [(stream, delta) for stream in self.streams if (delta := stream.take()) is not None]

    def fail(self, error: Exception) -> None:
        """Whoever waits is told; the first failure counts."""
        self.failure = self.failure or error
        self.news.set()

    def close(self) -> None:
        """End in the engine what has not ended."""
        self.is_closed = True
        self._link.remove(self)


def _broken(error: str) -> ApiError:
    """An answer that the engine ended: the model is broken, or the request's own parameters leave no way on."""
    told = ENGINE_NAME.sub("the answer", error)
    if "no finite logit" in error:
        return ApiError(500, told, code="model_error")
    return ApiError(400, told, code="no_way_on")


@dataclass(slots=True)
class _Entry:
    stream: RequestStream
    exchange: Exchange
    last_token: float | None = None  # on time.monotonic()


class Link:
    """Passes requests down and outputs up, whatever process the engine is in.

    known: gets the answers that ended by themselves. capacity: requests that may be in the engine, running and waiting.
    pixels: of the images that these requests hold here.
    limits: what the engine said of itself when it was last ready.
    stats: the engine's counters after its last step. traces: None = nobody wants them.
    """

    def __init__(
        self,
        metrics: Metrics,
        known: KnownAnswers,
        capacity: int,
        pixels: PixelRoom,
        traces: Traces | None = None,
    ) -> None:
        self._metrics, self._known, self._capacity = metrics, known, capacity
        self._pixels, self._traces = pixels, traces
        self.limits: Ready | None = None
        self.stats: EngineStats | None = None
        self._send: Callable[[Command], None] | None = None  # None while there is no engine
        self._entries: dict[str, _Entry] = {}
        self._exchanges: dict[str, set[Exchange]] = {}
        self._numbers = itertools.count(1)

    @property
    def num_requests(self) -> int:
        """Requests in the engine."""
        return len(self._entries)

    @property
    def is_up(self) -> bool:
        """Whether there is an engine to send requests to."""
        return self._send is not None

    def new_ids(self, count: int) -> list[str]:
        """Names for the engine, never used before."""
        return [f"request-{next(self._numbers)}" for _ in range(count)]

    def attach(self, limits: Ready, send: Callable[[Command], None]) -> None:
        """An engine is ready."""
        self.limits, self.stats, self._send = limits, limits.stats, send

    def detach(self, cause: str) -> None:
        """The engine is gone: every waiting client gets an error."""
        self._send = self.stats = None
        for request_id in list(self._entries):
            entry = self._pop(request_id)
            if entry is not None:
                self._is_over(entry, "error", None)
                entry.exchange.fail(EngineDeadError(cause))

    def open(self, streams: Sequence[RequestStream], known_as: tuple[str, ...] = ()) -> Exchange:
        """Queue the answers to one HTTP request.

        Raises QueueFullError, RequestError for images that never fit, or EngineDeadError while there is no engine.
        """
        if self._send is None:
            raise EngineDeadError("the engine is not running")
        if len(self._entries) + len(streams) > self._capacity:
            raise QueueFullError(f"{len(self._entries)} requests are in the engine already; try again later")
        self._pixels.check_room([span for stream in streams for span in stream.request.images], "the request")
        exchange = Exchange(self, streams, known_as)
        if self._traces is not None:
            exchange.trace = self._traces.current()
        for name in known_as:
            self._exchanges.setdefault(name, set()).add(exchange)
        for stream in streams:
            self._entries[stream.request.request_id] = _Entry(stream, exchange)
            self._pixels.take(stream.request.images)
            self._send(Submit(stream.request))
        return exchange

    def remove(self, exchange: Exchange) -> None:
        """Nobody waits for these answers any more."""
        for name in exchange.known_as:
            known = self._exchanges.get(name, set())
            known.discard(exchange)
            if not known:
                self._exchanges.pop(name, None)
        for stream in exchange.streams:
            request_id = stream.request.request_id
            if (entry := self._pop(request_id)) is not None:
                self._is_over(entry, "abort", None)
                self._finish(request_id, "abort")

    def abort(self, name: str) -> bool:
        """End every request of that name, as if it had come to its end; False when there is none."""
        found = [*self._exchanges.get(name, ())]
        for stream in (stream for exchange in found for stream in exchange.streams):
            self._finish(stream.request.request_id, "abort")
        return bool(found)

    def take(self, report: Steps | Refused) -> None:
        """What the engine reports."""
        if isinstance(report, Refused):
            entry = self._pop(report.request_id)
            if entry is not None:
                kind = QueueFullError if report.is_queue_full else RequestError
                self._is_over(entry, "error", None)
                entry.exchange.fail(kind(report.error))
            return
        self.stats = report.stats
        now = time.monotonic()
        for output in report.outputs:
            self._take_lines(output, now)
            for request_id, start, logprobs in output.prompt_logprobs:
                if (entry := self._entries.get(request_id)) is not None:
                    entry.stream.add_prompt_lines(start, logprobs)
            for ended in output.finished:
                self._take_end(ended)

    def _take_lines(self, output: StepOutput, now: float) -> None:
        for line, request_id in enumerate(output.request_ids):
            entry = self._entries.get(request_id)
            if entry is None:  # its client left
                continue
            stream = entry.stream
            try:
                stream.add_line(output, line)
            except Exception as error:  # that request's alone
                logger.exception("an answer cannot be read")
                entry.exchange.fail(error)
                continue
            self._metrics.token(stream.request, entry.last_token, now)
            entry.last_token = now
            if stream.wants_stop:
                self._finish(request_id, "stop")
            entry.exchange.news.set()

    def _take_end(self, ended: Finished) -> None:
        entry = self._pop(ended.request_id)
        if entry is None:
            return
        entry.stream.finish(ended)
        if ended.reason == "stop":
            request = entry.stream.request
            prompt = placeholders(request.token_ids, request.images)
            self._known.add(prompt, entry.stream.token_ids, request.cache_salt)
        self._is_over(entry, entry.stream.finish_reason or ended.reason, ended)
        exchange = entry.exchange
        exchange.num_open -= 1
        refusal = entry.stream.refusal
        if refusal is not None:
            exchange.fail(RequestError(refusal))
        elif ended.reason == "error":
            exchange.fail(_broken(ended.error or ""))
        else:
            exchange.news.set()

    def _pop(self, request_id: str) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._pixels.give(entry.stream.request.images)
        return entry

    def _is_over(self, entry: _Entry, reason: str, ended: Finished | None) -> None:
        """Count an answer. ended: None = its client left, or the engine did not have it to its end."""
        stream, exchange = entry.stream, entry.exchange
        self._metrics.finished(reason, stream.request, ended)
        if self._traces is not None and exchange.trace is not None:
            name = exchange.known_as[-1].partition("/")[2] if exchange.known_as else stream.request.request_id
            self._traces.answer(exchange.trace, name, stream, reason, ended)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        if self._send is not None:
            self._send(Finish(request_id, reason))
