"""Gate: what every HTTP request passes, whatever its path: id, key, errors, log line, count."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer import log
from deepinfer.serve.errors import ApiError, ClientLeft, Dialect, as_api_error
from deepinfer.serve.metrics import Metrics

if TYPE_CHECKING:
    from deepinfer.serve.traces import Traces

logger = log.get(__name__)

OPEN_PATHS = ("/", "/health", "/ready", "/version")  # and the page's own files
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the routes.

    keys: of which a client must send one; none = everybody may ask. They are kept as digests.
    traces: None = nobody wants them.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...], metrics: Metrics, traces: Traces | None = None) -> None:
        self._app, self._metrics, self._traces = app, metrics, traces
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=request_id, notes={})
        started, status = time.monotonic(), 0
        span = self._traces.begin(headers) if self._traces is not None and scope["method"] == "POST" else None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(raw=message["headers"])
                own["x-request-id"] = own["request-id"] = request_id  # the second is Anthropic's name
                own["x-content-type-options"] = "nosniff"
                message["headers"] = own.raw
            await send(message)

        try:
            state["caller"] = self._caller(scope["path"], headers)
            await self._app(scope, receive, answer)
        except ClientLeft:
            status = status or 499
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500 and not isinstance(error, ApiError):
                logger.exception("request %s failed", request_id)
            if status == 0:
                body = told.body(dialect_of(scope["path"], headers))
                await JSONResponse(body, told.status, told.headers)(scope, receive, answer)
        finally:
            path = getattr(scope.get("route"), "path", "unknown")
            self._metrics.answered(path, status)
            if self._traces is not None and span is not None:
                self._traces.end(span, path, status, request_id)
            self._note(scope, status, time.monotonic() - started, state)

    def _caller(self, path: str, headers: Headers) -> str:
        """Who asks: the number of the key. Raises ApiError (401)."""
        if not self._digests or path in OPEN_PATHS or path.startswith("/page/"):
            return "anybody"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        # Every key is compared, in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return f"key-{matches.index(True)}"

    def _note(self, scope: MutableMapping[str, Any], status: int, seconds: float, state: dict[str, Any]) -> None:
        fields = {
            "request_id": state["request_id"], "method": scope["method"], "path": _printable(scope["path"]),
            "status": status, "seconds": round(seconds, 3), **state["notes"],
        }  # fmt: skip
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.info("request %s", text, extra={"fields": fields})


def dialect_of(path: str, headers: Headers) -> Dialect:
    """In which shape a client wants errors."""
    return "anthropic" if path.startswith("/v1/messages") or "anthropic-version" in headers else "openai"


def _printable(path: str) -> str:
    """A path that cannot begin a line of its own in the log."""
    return path[:256] if path.isprintable() else repr(path[:256])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
