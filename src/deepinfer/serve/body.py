"""Request bodies: bounded in size and shape before anything looks into them."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from deepinfer.errors import shown
from deepinfer.serve.errors import ApiError, ClientLeft

MAX_DEPTH = 64
MAX_VALUES = 2**21  # of all lists and objects together
BIG_BYTES = 2**16  # bodies from here on are worked on beside the event loop


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body as it came. Raises ApiError (413) when it is too long, without reading all of it."""
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and (len(stated) > 15 or int(stated) > max_bytes):
        raise too_long(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_long(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(parts)


def too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {max_bytes} bytes; send less or raise --max-body-bytes", code="body_too_long"
    )


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError (400) for anything else, naming what is wrong with it."""
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
    _check_shape(value)
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels; make it flatter", code="too_deep")


def _check_shape(value: object) -> None:
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            num_values += len(children)
            inner += [child for child in children if isinstance(child, dict | list)]
        if num_values > MAX_VALUES:
            raise ApiError(400, f"the body has more than {MAX_VALUES} values; send less", code="too_many_values")
        if not inner:
            return
        level = inner
    raise _too_deep()
