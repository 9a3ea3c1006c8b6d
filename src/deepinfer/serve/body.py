"""Request bodies: bounded in size and shape before anything looks into them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from deepinfer.errors import shown
from deepinfer.serve.errors import ApiError, ClientLeft

MAX_DEPTH = 64
MAX_VALUES = 2**21  # of all lists and objects together, and commas and brackets in texts
MAX_TOTAL_BYTES = 2**28  # of all bodies that are being worked on
READ_SECONDS = 120.0  # for a whole body: clients that send slowly must not keep the others' bytes for ever
BIG_BYTES = 2**16  # bodies from here on are worked on beside the event loop


class Budget:
    """The bytes of all bodies that are being read or worked on; so many clients at once cannot fill the memory."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def take(self, count: int) -> None:
        """Raises ApiError (429) when too many bytes are in use."""
        if count > self._left:
            raise ApiError(429, "too many large bodies are being read; try again", headers={"retry-after": "1"})
        self._left -= count

    def give(self, count: int) -> None:
        """Bytes that are no longer in use."""
        self._left += count


async def read_bytes(request: Request, max_bytes: int, budget: Budget) -> bytes:
    """The body as it came, whose bytes the caller gives back to the budget.

    Raises ApiError when it is too long (413, without reading all of it), all bodies together are (429), or it does
    not come to its end in time (408).
    """
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and (len(stated) > 15 or int(stated) > max_bytes):
        raise too_long(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                if size + len(part) > max_bytes:
                    raise too_long(max_bytes)
                budget.take(len(part))
                size += len(part)
                parts.append(part)
    except ClientDisconnect:
        budget.give(size)
        raise ClientLeft from None
    except TimeoutError:
        budget.give(size)
        raise ApiError(408, f"the body did not come within {READ_SECONDS:g} s; send less", code="timeout") from None
    except BaseException:
        budget.give(size)
        raise
    return b"".join(parts)


def too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {max_bytes} bytes; send less or raise --max-body-bytes", code="body_too_long"
    )


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError (400) for anything else, naming what is wrong with it."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:  # before they become objects
        raise ApiError(400, f"the body has more than {MAX_VALUES} values; send less", code="too_many_values")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8 (at byte {error.start})", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON ({error})", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shown(value)}; it must be a JSON object", code="invalid_json")
    _check_depth(value)
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels; make it flatter", code="too_deep")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep()
