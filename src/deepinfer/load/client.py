"""A small HTTP client for load tests: one streamed completion a call, times taken as bytes come in."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from deepinfer.errors import ConfigError
from deepinfer.load.plan import Ask

CONNECT_SECONDS = 30.0
LINE_BYTES = 2**24


@dataclass
class Outcome:
    """What became of one request; times in seconds on `time.perf_counter()`.

    due: when it was to be sent. arrivals: of each piece of text. num_tokens: as the server counted them.
    """

    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    done: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None


class Target:
    """`/v1/completions` of a server. url: its root, with or without /v1. model: None = the server's first."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, ignore_eos: bool = True) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}; it must be as in http://127.0.0.1:8000")
        self._host, self._is_tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._model, self._key, self._ignore_eos = model, key, ignore_eos

    async def ask(self, ask: Ask, due: float, seconds: float) -> Outcome:
        """Send one request and read its whole answer. Failures are part of the outcome."""
        outcome = Outcome(due)
        body: dict[str, object] = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= ({"model": self._model} if self._model else {}) | ({"ignore_eos": True} if self._ignore_eos else {})
        data = json.dumps(body).encode()
        try:
            async with asyncio.timeout(seconds):
                await self._exchange(data, outcome)
        except TimeoutError:
            outcome.error = f"no end after {seconds:g} s"
        except (OSError, ValueError, EOFError) as error:
            outcome.error = str(error) or type(error).__name__
        outcome.done = time.perf_counter()
        return outcome

    async def _exchange(self, data: bytes, outcome: Outcome) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._is_tls or None, limit=LINE_BYTES
            )
        try:
            key = f"authorization: Bearer {self._key}\r\n" if self._key else ""
            head = (
                f"POST {self._root}/v1/completions HTTP/1.1\r\nhost: {self._host}\r\n{key}"
                f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
            )
            outcome.sent = time.perf_counter()
            writer.write(head.encode() + data)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            is_chunked = False
            while (line := (await reader.readline()).strip().lower()) != b"":
                is_chunked |= line == b"transfer-encoding: chunked"
            parts = _chunks(reader) if is_chunked else _rest(reader)
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise ValueError(f"status {status}: {text[:200]}")
            await self._read(parts, outcome)
        finally:
            writer.close()

    async def _read(self, parts: AsyncIterator[bytes], outcome: Outcome) -> None:
        rest = b""
        async for part in parts:
            now = time.perf_counter()
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == event or data == b"[DONE]":
                    continue
                content = json.loads(data)
                if "error" in content:
                    raise ValueError(content["error"].get("message", "error"))
                if content.get("usage"):
                    outcome.num_tokens = content["usage"]["completion_tokens"]
                    outcome.num_prompt_tokens = content["usage"]["prompt_tokens"]
                if content.get("choices"):
                    outcome.arrivals.append(now)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(2**16):
        yield part
