"""Answers of `/v1/responses` that can be retrieved: all that run, and the last ones that ended."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from deepinfer.frontend.protocol_answers import ProtocolStream
from deepinfer.serve.errors import ClientLeft, as_api_error
from deepinfer.serve.link import Exchange

MAX_KEPT = 1024
MAX_KEPT_TOKENS = 2**20  # of the kept answers together


class Stored:
    """One answer.

    name: with the caller in front, so that nobody finds another's. told: what the response object says of its request,
    beside what `stream` knows.
    """

    def __init__(self, stream: ProtocolStream, exchange: Exchange, name: str, told: Mapping[str, Any]) -> None:
        self.stream, self.name, self.told = stream, name, told
        self.is_cancelled = False
        self.task: asyncio.Task[None] | None = None
        self._exchange = exchange

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.stream.is_finished or self._exchange.is_closed

    def body(self) -> dict[str, Any]:
        """The response object as it stands."""
        body: dict[str, Any] = json.loads(self.stream.response()) | dict(self.told)
        failure = self._exchange.failure
        if failure is not None and not isinstance(failure, ClientLeft):
            message = as_api_error(failure).message
            return body | {"status": "failed", "error": {"code": "server_error", "message": message}}
        is_cut_off = self._exchange.is_closed and not self.stream.is_finished
        if self.is_cancelled or is_cut_off or self.stream.finish_reason == "abort":
            return body | {"status": "cancelled", "incomplete_details": None}
        return body


class ResponseStore:
    """Bounded: the oldest answers that have ended are forgotten first; those that run are bounded by the engine."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[Stored, bool]] = OrderedDict()

    def add(self, stored: Stored, *, is_kept: bool) -> None:
        """is_kept: also after its end."""
        self._stored[stored.name] = stored, is_kept
        over = [(name, one, kept) for name, (one, kept) in self._stored.items() if one.is_over]
        num_tokens = sum(one.stream.num_tokens + len(one.stream.request.token_ids) for _, one, _ in over)
        num_kept = len(over)
        for name, one, kept in over:
            if kept and num_kept <= MAX_KEPT and num_tokens <= MAX_KEPT_TOKENS:
                continue
            del self._stored[name]
            num_kept -= 1
            num_tokens -= one.stream.num_tokens + len(one.stream.request.token_ids)

    def get(self, name: str) -> Stored | None:
        """An answer that runs, or is kept."""
        stored, is_kept = self._stored.get(name, (None, False))
        return stored if stored is not None and (is_kept or not stored.is_over) else None

    def remove(self, name: str) -> None:
        """Forget an answer."""
        self._stored.pop(name, None)
