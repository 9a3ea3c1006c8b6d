"""`/v1/messages` and `/v1/messages/count_tokens` (Anthropic)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.protocol_answers import ProtocolStream
from deepinfer.serve import fields
from deepinfer.serve.errors import ApiError
from deepinfer.serve.protocol import NOT_HERE, EventWriter, protocol_stream
from deepinfer.serve.service import Service

OWN = frozenset({
    "messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "output_config", "output_format",
    "betas", "inference_geo", "cache_control", "context_management", "thread",
})  # fmt: skip
REFUSED = {
    "mcp_servers": "this server runs no tools itself; call them and give their results",
    "container": "this server runs no tools itself; leave it out",
}


async def create(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, OWN, request, refused=REFUSED, left_out=NOT_HERE)
    if body.get("thread") is not None:
        raise _no_threads()
    answer_id, known_as = service.ids(body, request, "msg_")
    stream = await service.work(is_big, lambda: _stream(service, body, answer_id))
    is_stream = fields.switch(body, "stream")
    return service.answer(service.link.open([stream], known_as), EventWriter(stream, "anthropic"), is_stream=is_stream)


async def count_tokens(request: Request) -> Response:
    """The tokens that a conversation would have as a prompt."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, OWN, request, refused=REFUSED, left_out=NOT_HERE)
    return JSONResponse({"input_tokens": await service.work(is_big, lambda: _count(service, body))})


def _no_threads() -> ApiError:
    """The refusal after which Anthropic's client sends the whole conversation instead."""
    message = "thread is set, but this server keeps no conversations; send all messages without it"
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return ApiError(400, message, "thread", "invalid_request", details=details)


def _count(service: Service, body: Mapping[str, Any]) -> int:
    prompt = service.encode(_with_effort(body, service), "messages")
    return len(service.builder.spelled_out(prompt.token_ids, prompt.images))


def _stream(service: Service, body: Mapping[str, Any], answer_id: str) -> ProtocolStream:
    params = fields.sampling_params(body, service.defaults, leave_out=NOT_HERE, stop=body.get("stop_sequences"))
    prompt = service.encode(_with_effort(body, service), "messages", form=_form(body))
    return protocol_stream(service, body, prompt, params, answer_id, lowers_max_tokens=True)


def _with_effort(body: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """The body with the server's default effort, where it states none."""
    stated = fields.mapping(body, "output_config")
    if service.options.default_effort is None or "effort" in stated:
        return dict(body)
    return {**body, "output_config": {**stated, "effort": service.options.default_effort}}


def _form(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of `output_config.format`, or of its older name `output_format`."""
    stated = fields.mapping(body, "output_config").get("format", body.get("output_format"))
    if stated is None:
        return None
    if not isinstance(stated, Mapping) or stated.get("type") != "json_schema" or "schema" not in stated:
        raise RequestError(
            f'output_config.format is {shown(stated)}; it must be {{"type": "json_schema", "schema": ...}}'
        )
    return {"json": stated["schema"]}
