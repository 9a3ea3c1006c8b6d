"""What a client is told when something goes wrong: a status and a body in the shape of its protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.errors import EngineDeadError, QueueFullError, RequestError

Dialect = Literal["openai", "anthropic"]

RETRY_SECONDS = "1"
# Parameters whose name alone does not show that it is one.
PLAIN_NAMES = (
    "n", "messages", "temperature", "stop", "seed", "prompt", "priority", "logprobs", "thinking", "tools", "input",
    "include", "functions", "audio", "container", "modalities", "suffix", "conversation",
)  # fmt: skip
# Status to the error type of each dialect.
OPENAI_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


@dataclass(frozen=True)
class ApiError(Exception):
    """An answer that is an error.

    message: for the client; nothing in it is secret. details: for clients of Anthropic, that look there for a way on.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The structured body."""
        if dialect == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "api_error")
            details = {"details": self.details} if self.details else {}
            return {"type": "error", "error": {"type": kind, "message": self.message, **details}}
        kind = OPENAI_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event(self, dialect: Dialect) -> bytes:
        """The same in a stream that has begun."""
        name = b"event: error\n" if dialect == "anthropic" else b""
        return name + b"data: " + json.dumps(self.body(dialect)).encode() + b"\n\n"


class ClientLeft(Exception):
    """The client closed the connection; nobody is there to be told anything."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error. Anything unforeseen is an internal error without details."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": RETRY_SECONDS})
        case RequestError():
            return ApiError(400, str(error), param=_param(str(error)), code="invalid_request")
        case EngineDeadError():
            message = "the engine stopped while this request was in it; try again"
            return ApiError(503, message, code="engine_stopped", headers={"retry-after": RETRY_SECONDS})
        case TimeoutError():
            return ApiError(408, "the request took longer than this server allows (request_seconds)", code="timeout")
        case _:
            return ApiError(500, "internal error; the server's log has the cause", code="internal_error")


def _param(message: str) -> str | None:
    """The parameter that a refusal begins with, by the house rule for messages."""
    name = message.partition(" ")[0].partition("[")[0]
    is_name = "_" in name and name.isascii() and name.replace("_", "").isalpha()
    return name if is_name or name in PLAIN_NAMES else None
