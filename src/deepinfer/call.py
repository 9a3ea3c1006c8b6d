"""One caller's requests in an engine: ids, streams, stop texts, and a clean end whatever happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from queue import Empty
from types import TracebackType
from typing import TYPE_CHECKING

from deepinfer.engine.client import EngineClient
from deepinfer.errors import EngineDeadError, RequestError
from deepinfer.frontend.outputs import ChatDelta, OutputDelta
from deepinfer.frontend.request_ids import RequestIds
from deepinfer.frontend.stream import RequestStream
from deepinfer.messages import StepOutput

if TYPE_CHECKING:
    from deepinfer.frontend.chat_stream import ChatStream

MAX_LEAVE_SECONDS = 1.0


class Call:
    """The requests of one caller; leaving the context aborts those that still run.

    Leaving waits for the ends of these requests, so that their blocks are free and their ids can
    be used again, but `MAX_LEAVE_SECONDS` at most: it may be the garbage collector that leaves,
    in a thread that the ends themselves wait for. For the same reason leaving takes no lock.
    """

    def __init__(self, client: EngineClient, ids: RequestIds):
        self._client, self._ids = client, ids
        self._subscription = client.subscribe()
        self._running: dict[str, RequestStream] = {}
        self._taken: list[str] = []

    @property
    def num_running(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._running)

    def take_id(self, request_id: str | None = None) -> str:
        """Reserve an id, or make one up, until the call ends. Raises RequestError for one in use."""
        taken = self._ids.take(request_id)
        self._taken.append(taken)
        return taken

    def take_ids(self, count: int, request_id: str | None = None) -> list[str]:
        """Ids for so many answers to one prompt; the first is the one that the caller knows."""
        taken = self.take_id(request_id)
        more = self._ids.take_more(taken, count - 1)
        self._taken += more
        return [taken, *more]

    def submit(self, stream: RequestStream) -> None:
        """Queue the stream's request. Raises RequestError when it is refused."""
        request_id = stream.request.request_id
        self._running[request_id] = stream  # first: if the caller is interrupted in between, leaving still aborts it
        try:
            self._subscription.submit(stream.request)
        except RequestError:
            del self._running[request_id]
            raise

    def wait(self) -> StepOutput:
        """The next output of the engine, after every stream has taken its part of it.

        Requests whose stop text has appeared are finished in the engine.
        """
        output = self._subscription.get()
        for line, request_id in enumerate(output.request_ids):
            stream = self._running.get(request_id)
            if stream is not None:
                stream.add_line(output, line)
                if stream.wants_stop:
                    self._client.finish(request_id, "stop")
        for request_id, start, logprobs in output.prompt_logprobs:
            if (stream := self._running.get(request_id)) is not None:
                stream.add_prompt_lines(start, logprobs)
        for ended in output.finished:
            if (stream := self._running.pop(ended.request_id, None)) is not None:
                stream.finish(ended)
        return output

    def deltas(self, streams: Sequence[RequestStream]) -> Iterator[OutputDelta]:
        """Submit the answers to one prompt and give their pieces as they come.

        Raises RequestError when one is refused, also if that turns out later (its grammar).
        """
        for stream in streams:
            self.submit(stream)
        while self._running:
            self.wait()
            for stream in streams:
                if stream.refusal is not None:
                    raise RequestError(stream.refusal)
                if (delta := stream.take()) is not None:
                    yield delta

    def chat_deltas(self, streams: Sequence[ChatStream]) -> Iterator[ChatDelta]:
        """The same for chat answers."""
        for delta in self.deltas(streams):
            assert isinstance(delta, ChatDelta)
            yield delta

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request_id in self._running:
            self._client.abandon(request_id, self._subscription)
        deadline = time.monotonic() + MAX_LEAVE_SECONDS
        try:
            while any(map(self._client.is_routed, self._running)):
                self._subscription.get(timeout=max(0.0, deadline - time.monotonic()))
        except (EngineDeadError, Empty):
            pass
        finally:
            self._running.clear()
            for request_id in self._taken:
                self._ids.release(request_id)
