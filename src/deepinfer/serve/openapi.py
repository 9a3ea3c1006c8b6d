"""`/openapi.json`: the endpoints and their bodies, made from the declared parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deepinfer.__about__ import __version__
from deepinfer.config import fields
from deepinfer.config.fields import Option
from deepinfer.sampling.params import SamplingParams

KINDS = {int: "integer", float: "number", bool: "boolean", str: "string"}
TEXT, SWITCH, OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
MESSAGES = {"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role"], "properties": {"role": TEXT, "content": {}}}}  # fmt: skip
PROMPT = {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": [TEXT, {"type": "integer"}, {"type": "array"}]}}]}
IMAGES = {"type": "array", "items": TEXT, "description": "data URLs, one for each image token of the prompt"}
EVERYWHERE = {"priority": {"type": "integer"}, "request_id": TEXT, "cache_salt": TEXT}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
CHAT = {"messages": MESSAGES, "tools": {"type": "array", "items": OBJECT}, "tool_choice": {},
        "parallel_tool_calls": SWITCH, "thinking": OBJECT, "reasoning_effort": TEXT, "response_format": OBJECT,
        "stream": SWITCH, "stream_options": OBJECT, "continue_final_message": SWITCH,
        "chat_template_kwargs": OBJECT, "return_token_ids": SWITCH}  # fmt: skip
# Path: what it does, its own fields, the required ones, and whether sampling parameters belong to it.
BODIES: dict[str, tuple[str, dict[str, Any], list[str], bool]] = {
    "/v1/chat/completions": ("Answer a conversation (OpenAI)", CHAT, ["messages"], True),
    "/v1/completions": (
        "Go on from texts or token ids (OpenAI)",
        {"prompt": PROMPT, "images": IMAGES, "echo": SWITCH, "stream": SWITCH, "return_token_ids": SWITCH},
        ["prompt"], True,
    ),
    "/v1/messages": (
        "Answer a conversation (Anthropic)",
        {"messages": MESSAGES, "system": {}, "tools": CHAT["tools"], "tool_choice": OBJECT, "thinking": OBJECT,
         "stop_sequences": {"type": "array", "items": TEXT}, "stream": SWITCH},
        ["messages"], True,
    ),
    "/v1/messages/count_tokens": ("Count the tokens of a prompt", {"messages": MESSAGES}, ["messages"], False),
    "/v1/responses": (
        "Answer an input (OpenAI)",
        {"input": {}, "instructions": TEXT, "tools": CHAT["tools"], "tool_choice": {}, "reasoning": OBJECT,
         "text": OBJECT, "max_output_tokens": {"type": "integer", "minimum": 1}, "stream": SWITCH,
         "background": SWITCH, "store": SWITCH},
        ["input"], True,
    ),
    "/tokenize": ("Text or conversation to token ids", {"prompt": TEXT, "messages": MESSAGES}, [], False),
    "/detokenize": ("Token ids to text", {"tokens": IDS}, ["tokens"], False),
    "/generate": (
        "Go on from token ids or a text",
        {"prompt_token_ids": IDS, "prompt": TEXT, "images": IMAGES, "sampling_params": OBJECT}, [], True,
    ),
    "/abort": ("End a request", {"request_id": TEXT}, ["request_id"], False),
}  # fmt: skip
PLAIN = {
    "/v1/models": "The names of the model", "/health": "Whether the engine runs",
    "/ready": "Whether requests are taken", "/version": "The version",
}  # fmt: skip
STORED = {"get": "Read an answer, also while it runs", "delete": "End and forget an answer"}


async def document(request: Request) -> Response:
    """The OpenAPI document."""
    return JSONResponse(describe())


@cache
def describe() -> dict[str, Any]:
    """The document as it is sent."""
    paths: dict[str, Any] = {path: {"post": _post(*parts)} for path, parts in BODIES.items()}
    paths |= {path: {"get": _operation(text)} for path, text in PLAIN.items()}
    name = {"name": "response_id", "in": "path", "required": True, "schema": TEXT}
    stored = {method: _operation(text) | {"parameters": [name]} for method, text in STORED.items()}
    cancelled = _operation("End an answer that runs") | {"parameters": [name]}
    paths |= {"/v1/responses/{response_id}": stored, "/v1/responses/{response_id}/cancel": {"post": cancelled}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "deepinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": {"type": "object"}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(summary: str, own: dict[str, Any], required: list[str], is_sampled: bool) -> dict[str, Any]:
    sampling = {option.name: _schema(option) for option in fields.read_options(SamplingParams)} if is_sampled else {}
    own = EVERYWHERE | own if is_sampled else own
    body = {
        "type": "object",
        "properties": {"model": {"type": ["string", "null"]}} | sampling | own,
        "required": required,
    }
    content = {"application/json": {"schema": body}}
    streams: dict[str, Any] = {"text/event-stream": {}} if "stream" in own else {}
    return _operation(summary, streams) | {"requestBody": {"required": True, "content": content}}


def _operation(summary: str, streams: dict[str, Any] | None = None) -> dict[str, Any]:
    error = {
        "description": "refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    found = {"description": "done", "content": {"application/json": {"schema": OBJECT}} | (streams or {})}
    return {"summary": summary, "responses": {"200": found, "4XX": error, "503": error}}


def _schema(option: Option) -> dict[str, Any]:
    """Of one sampling parameter; null is the same as leaving it out."""
    schema: dict[str, Any] = {"description": option.help}
    if issubclass(option.kind, tuple) or option.kind is str and not option.choices and not option.is_list:
        return schema  # several shapes, which the parameter itself checks
    one: dict[str, Any] = {"type": KINDS[option.kind]}
    if option.choices:
        one["enum"] = [*option.choices]
    if option.low is not None:
        one["minimum"] = option.low
    if option.high is not None:
        one["maximum"] = option.high
    return schema | {"anyOf": [{"type": "array", "items": one} if option.is_list else one, {"type": "null"}]}
