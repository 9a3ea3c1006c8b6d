"""`/v1/chat/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deepinfer.errors import RequestError
from deepinfer.frontend.chat import ChatPrompt
from deepinfer.frontend.chat_stream import ChatStream
from deepinfer.frontend.stops import StopStrings
from deepinfer.sampling.params import SamplingParams
from deepinfer.serve import fields
from deepinfer.serve.chat_writer import ChatWriter
from deepinfer.serve.service import Service
from deepinfer.serve.usage import StreamUsage

OWN = frozenset({
    "messages", "tools", "tool_choice", "thinking", "reasoning_effort", "response_format", "stream_options",
    "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "enable_thinking", "include_reasoning",
})  # fmt: skip
REFUSED = {
    "functions": "this server knows the newer form; give tools",
    "function_call": "this server knows the newer form; give tool_choice",
    "audio": "this server makes no sound; leave it out",
    "web_search_options": "this server searches nothing; leave it out",
}


async def create(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, OWN, request, refused=REFUSED)
    chat_id, known_as = service.ids(body, request, "chatcmpl-")
    prompt, streams = await service.work(is_big, lambda: _streams(service, body))
    is_stream = fields.switch(body, "stream")
    writer = ChatWriter(
        service.tokenizer, streams, chat_id, fields.text(body, "model") or service.names[0],
        is_thinking=prompt.is_thinking,
        shows_thinking=fields.switch(body, "include_reasoning", True),
        stream_usage=StreamUsage.of(body),
        wants_ids=fields.switch(body, "return_token_ids"),
    )  # fmt: skip
    return service.answer(service.link.open(streams, known_as), writer, is_stream=is_stream)


def encode(service: Service, body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of a chat body, with this server's defaults. Raises RequestError."""
    goes_on = fields.switch(body, "continue_final_message")
    if not goes_on and not fields.switch(body, "add_generation_prompt", True):
        raise RequestError(
            "add_generation_prompt is False, but every prompt ends where the answer begins; leave it out or set "
            "continue_final_message"
        )
    return service.encode(with_thinking(body, service), "chat", continue_final_message=goes_on)


def with_thinking(body: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """The body with `thinking` and `reasoning_effort` from wherever it or the server states them."""
    result, extra = dict(body), fields.mapping(body, "chat_template_kwargs")
    stated = [fields.switch(place, name) for place, name in _switches(body, extra) if place.get(name) is not None]
    if stated and result.get("thinking") is None:
        result["thinking"] = {"type": "enabled" if stated[0] else "disabled"}
    effort = extra.get("reasoning_effort", extra.get("effort"))
    if effort is not None and result.get("reasoning_effort") is None:
        result["reasoning_effort"] = effort
    is_off = isinstance(result.get("thinking"), Mapping) and result["thinking"].get("type") == "disabled"
    if result.get("reasoning_effort") is None and not is_off and service.options.default_effort is not None:
        result["reasoning_effort"] = service.options.default_effort
    return result


def _switches(body: Mapping[str, Any], extra: Mapping[str, Any]) -> Sequence[tuple[Mapping[str, Any], str]]:
    return ((body, "enable_thinking"), (extra, "thinking"), (extra, "enable_thinking"))


def _streams(service: Service, body: Mapping[str, Any]) -> tuple[ChatPrompt, list[ChatStream]]:
    """The prompt, and a stream for each answer."""
    params = fields.sampling_params(body, service.defaults)
    service.check_count(params.n)
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is set, but a chat has no place for them; use /generate or /v1/completions")
    prompt = encode(service, body)
    params, stops = content_stops(params, fields.switch(body, "stop_in_thinking", service.options.stop_in_thinking))
    params = prompt.constrained(params, service.tokenizer.think_end_id)
    streams = [
        ChatStream(one, service.tokenizer, prompt.parser(stop_strings(stops, params)), sample=sample)
        for sample, one in enumerate(service.request(body, prompt.token_ids, params, images=prompt.images))
    ]
    return prompt, streams


def content_stops(params: SamplingParams, in_thinking: bool) -> tuple[SamplingParams, tuple[str, ...]]:
    """The parameters without stop strings, and the stop strings; unless they also end the thinking."""
    return (params, ()) if in_thinking else (dataclasses.replace(params, stop=()), params.stop)


def stop_strings(stops: tuple[str, ...], params: SamplingParams) -> StopStrings | None:
    """What looks for them in the content of one answer."""
    return StopStrings(stops, keeps_match=params.include_stop_str_in_output) if stops else None
