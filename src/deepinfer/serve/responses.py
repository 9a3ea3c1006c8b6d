"""`/v1/responses`: create, retrieve, cancel and delete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.protocol_answers import ProtocolStream
from deepinfer.serve import fields
from deepinfer.serve.errors import ApiError
from deepinfer.serve.link import Exchange
from deepinfer.serve.protocol import NOT_HERE, EventWriter, frame, protocol_stream
from deepinfer.serve.response_store import Stored
from deepinfer.serve.service import Service

OWN = frozenset({
    "input", "instructions", "tools", "tool_choice", "reasoning", "text", "max_output_tokens", "background", "include",
    "truncation", "stream_options", "previous_response_id", "conversation", "max_tool_calls",
    "top_logprobs",
})  # fmt: skip
REFUSED = {
    "previous_response_id": "this server keeps no conversations; send the whole input",
    "conversation": "this server keeps no conversations; send the whole input",
    "prompt": "this server keeps no prompts; send instructions and input",
    "top_logprobs": "this protocol's answers have no log-probabilities here; ask /v1/chat/completions",
}
LEFT_OUT = tuple(name for name in NOT_HERE if name != "stop")  # a stop is no field of the protocol, but does no harm
LOGPROBS = "message.output_text.logprobs"

WITH_RESPONSE = frozenset(
    f"response.{state}" for state in ("created", "in_progress", "queued", "completed", "incomplete", "failed")
)


async def create(request: Request) -> Response:
    """Answer an input; in the background if it says so."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, OWN, request, refused=REFUSED, left_out=LEFT_OUT)
    if LOGPROBS in fields.texts(body, "include"):
        raise RequestError(f"include has {LOGPROBS!r}, but {REFUSED['top_logprobs']}")
    answer_id, known_as = service.ids(body, request, "resp_")
    stream = await service.work(is_big, lambda: _stream(service, body, answer_id))
    is_stream, is_background = fields.switch(body, "stream"), fields.switch(body, "background")
    if is_stream and is_background:
        raise RequestError("stream and background are both set; a background answer is read with GET, give one of them")
    exchange = service.link.open([stream], known_as)
    is_kept = fields.switch(body, "store", True) or is_background
    told = {
        "background": is_background, "store": is_kept, "metadata": fields.mapping(body, "metadata"),
        "parallel_tool_calls": fields.switch(body, "parallel_tool_calls", True),
    }  # fmt: skip
    stored = Stored(stream, exchange, known_as[-1], told)
    service.responses.add(stored, is_kept=is_kept)
    if not is_background:
        return service.answer(exchange, ResponsesWriter(stream, stored), is_stream=is_stream)
    stored.task = asyncio.create_task(_run(exchange, service.options.request_seconds))  # the loop alone would forget it
    return JSONResponse(stored.body())


async def _run(exchange: Exchange, seconds: float) -> None:
    """Wait for an answer that no connection waits for."""
    try:
        async with asyncio.timeout(seconds):
            await exchange.finished()
    except Exception as error:
        exchange.fail(error)
    finally:
        exchange.close()


async def retrieve(request: Request) -> Response:
    """An answer as far as it is, also while it runs."""
    if request.query_params.get("stream", "false") != "false":
        raise RequestError("stream is set, but the events of an earlier answer are not kept; ask without it")
    return JSONResponse(_stored(request).body())


async def cancel(request: Request) -> Response:
    """End an answer that runs; one that has ended stays as it is."""
    stored = _stored(request)
    service: Service = request.app.state.service
    stored.is_cancelled = not stored.is_over
    service.link.abort(stored.name)
    return JSONResponse(stored.body())


async def delete(request: Request) -> Response:
    """End an answer and forget it."""
    stored = _stored(request)
    service: Service = request.app.state.service
    service.link.abort(stored.name)
    service.responses.remove(stored.name)
    return JSONResponse({"id": request.path_params["response_id"], "object": "response", "deleted": True})


def _stored(request: Request) -> Stored:
    """The caller's own answer of that id. Raises ApiError (404)."""
    service: Service = request.app.state.service
    response_id = request.path_params["response_id"]
    stored = service.responses.get(f"{request.state.caller}/{response_id}")
    if stored is None:
        raise ApiError(404, f"response {shown(response_id)} is not here", code="response_not_found")
    return stored


def _stream(service: Service, body: Mapping[str, Any], answer_id: str) -> ProtocolStream:
    params = fields.sampling_params(
        body, service.defaults, leave_out=LEFT_OUT, max_tokens=body.get("max_output_tokens")
    )
    prompt = service.encode(_with_effort(body, service), "responses")
    return protocol_stream(service, body, prompt, params, answer_id)


def _with_effort(body: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """The body with the server's default effort, where it states none."""
    stated = fields.mapping(body, "reasoning")
    if service.options.default_effort is None or stated.get("effort") is not None:
        return dict(body)
    return {**body, "reasoning": {**stated, "effort": service.options.default_effort}}


class ResponsesWriter(EventWriter):
    """The events of one answer, with the usage as the engine counted it and an end that says "cancelled"."""

    def __init__(self, stream: ProtocolStream, stored: Stored) -> None:
        super().__init__(stream, "openai")
        self._stored = stored

    def whole(self) -> dict[str, Any]:
        return self._stored.body()

    def _take(self) -> bytes:
        return b"".join(frame(name, self._told(name, text)) for name, text in self._stream.take_events())

    def _told(self, name: str | None, text: str) -> str:
        """The event; one that holds the response object tells it as `Stored` does."""
        if name not in WITH_RESPONSE:
            return text
        event = json.loads(text)
        is_over = self._stored.is_cancelled and event["response"]["status"] != "in_progress"
        event["response"] = self._stored.body() if is_over else event["response"] | dict(self._stored.told)
        return json.dumps(event, ensure_ascii=False)
