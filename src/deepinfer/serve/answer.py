"""AnswerResponse: one HTTP request's answer, whole or as a stream of events, and a clean end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepinfer import log
from deepinfer.frontend.outputs import OutputDelta
from deepinfer.frontend.stream import RequestStream
from deepinfer.serve.errors import ApiError, ClientLeft, Dialect, as_api_error
from deepinfer.serve.link import Exchange

logger = log.get(__name__)

# Headers wait so long for the first news of a stream, so that a refusal still gets its status.
REFUSAL_SECONDS = 2.0
PING_SECONDS = 15.0  # of silence, after which a comment keeps proxies from closing a stream
TELL_SECONDS = 5.0  # for a client to take an error
PING = b": ping\n\n"
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """Answers in the words of a protocol; each method gives finished events, several at once or none (b"")."""

    dialect: Dialect

    def start(self) -> bytes:
        """Before anything else."""
        ...

    def add(self, stream: RequestStream, delta: OutputDelta) -> bytes:
        """The next piece of one answer."""
        ...

    def end(self) -> bytes:
        """All answers are complete."""
        ...

    def whole(self) -> dict[str, Any]:
        """All answers as one body, in place of the events."""
        ...


class AnswerResponse(Response):
    """Waits for an exchange and writes it down; ends it when the client leaves or the time is over."""

    def __init__(self, exchange: Exchange, writer: Writer, *, is_stream: bool, seconds: float) -> None:
        self._exchange, self._writer, self._is_stream, self._seconds = exchange, writer, is_stream, seconds
        self.status_code, self.background = 200, None
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout(self._seconds):
                await (self._stream(send) if self._is_stream else self._whole(send))
        except ClientLeft:
            pass
        except Exception as error:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(TELL_SECONDS):
                    await self._tell(error, send)
        finally:
            watcher.cancel()
            self._exchange.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._exchange.fail(ClientLeft())

    async def _whole(self, send: Send) -> None:
        await self._exchange.finished()
        await self._send_body(200, self._writer.whole(), {}, send)

    async def _stream(self, send: Send) -> None:
        exchange, writer = self._exchange, self._writer
        await exchange.wait(REFUSAL_SECONDS)
        await self._begin(200, EVENTS, send)
        events = [writer.start()]
        while True:
            events += [writer.add(stream, delta) for stream, delta in exchange.take()]
            is_over = not exchange.num_open
            if is_over:
                events.append(writer.end())
            if data := b"".join(events):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if is_over:
                break
            events = [] if await exchange.wait(PING_SECONDS) else [PING]
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]], send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _send_body(self, status: int, body: dict[str, Any], headers: dict[str, str], send: Send) -> None:
        data = json.dumps(body).encode()
        own = {"content-type": "application/json", "content-length": str(len(data)), **headers}
        await self._begin(status, [(name.encode(), value.encode()) for name, value in own.items()], send)
        await send({"type": "http.response.body", "body": data})

    async def _tell(self, error: Exception, send: Send) -> None:
        told = as_api_error(error)
        if told.status == 500 and not isinstance(error, ApiError):
            logger.exception("a request failed")
        if not self._has_begun:
            await self._send_body(told.status, told.body(self._writer.dialect), told.headers, send)
        elif self._is_stream:
            await send({"type": "http.response.body", "body": told.event(self._writer.dialect)})
