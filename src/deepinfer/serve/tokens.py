"""`/tokenize`, `/detokenize`, `/generate` (token ids in and out) and `/abort`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.images import data_url_images
from deepinfer.frontend.outputs import OutputDelta
from deepinfer.frontend.stream import RequestStream
from deepinfer.serve import chat, fields
from deepinfer.serve.chat_writer import DONE
from deepinfer.serve.errors import Dialect
from deepinfer.serve.service import Service

TOKENIZE = frozenset({*chat.OWN, "prompt", "return_token_strs"})
DETOKENIZE = frozenset({"tokens", "token_ids"})
GENERATE = frozenset({"prompt", "prompt_token_ids", "text", "input_ids", "token_ids", "images", "sampling_params"})
# Names of the prompt in `/generate`: vLLM's and SGLang's.
PROMPT_NAMES = {
    "prompt": "prompt", "text": "prompt",
    "prompt_token_ids": "prompt_token_ids", "input_ids": "prompt_token_ids", "token_ids": "prompt_token_ids",
}  # fmt: skip


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as `/v1/chat/completions` would encode it."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, TOKENIZE, request, fixed={} if body.get("messages") else service.fixed_of_texts)
    ids = await service.work(is_big, lambda: _ids(service, body))
    result: dict[str, Any] = {"count": len(ids), "max_model_len": service.builder.max_model_len, "tokens": ids}
    if fields.switch(body, "return_token_strs"):
        result["token_strs"] = [service.tokenizer.spelling(one).decode("utf-8", "replace") for one in ids]
    return JSONResponse(result)


def _ids(service: Service, body: Mapping[str, Any]) -> list[int]:
    if body.get("messages") is not None:
        chatted = chat.encode(service, body)
        return service.builder.spelled_out(chatted.token_ids, chatted.images)
    text = fields.text(body, "prompt")
    if text is None:
        raise RequestError("prompt is missing; give a text as prompt, or a conversation as messages")
    return service.tokenizer.encode(text)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens spelled out."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, DETOKENIZE, request, fixed=fields.SPELLED_OUT)
    ids = body.get("tokens", body.get("token_ids"))
    limit = service.builder.vocab_size
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < limit for one in ids):
        raise RequestError(f"tokens is {shown(ids)}; it must be a list of token ids from 0 to {limit - 1}")
    text = await service.work(is_big, lambda: service.tokenizer.decode(ids, skip_special_tokens=False))
    return JSONResponse({"prompt": text})


async def generate(request: Request) -> Response:
    """Continue one prompt; outputs and deltas as the Python API has them."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, GENERATE, request, fixed=service.fixed_of_texts)
    answer_id, known_as = service.ids(body, request, "gen-")
    streams = await service.work(is_big, lambda: _streams(service, body, answer_id))
    writer = GenerateWriter(streams)
    exchange = service.link.open(streams, known_as)
    return service.answer(exchange, writer, is_stream=fields.switch(body, "stream"))


def _streams(service: Service, body: Mapping[str, Any], answer_id: str) -> list[RequestStream]:
    given = {name: body[name] for name in PROMPT_NAMES if body.get(name) is not None}
    if len(given) != 1:
        raise RequestError(f"prompt is given {len(given)} times; give one of {', '.join(PROMPT_NAMES)}")
    ((name, prompt),) = given.items()
    params = fields.sampling_params(body, service.defaults, **fields.mapping(body, "sampling_params"))
    service.check_count(params.n)
    images = data_url_images(body.get("images"))
    made = service.request(body, {PROMPT_NAMES[name]: prompt}, params, images=images)
    return [RequestStream(one, service.tokenizer, sample=sample, asked_as=answer_id) for sample, one in enumerate(made)]


class GenerateWriter:
    """Of one request; see `Writer`."""

    dialect: Dialect = "openai"

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams

    def start(self) -> bytes:
        return b""

    def add(self, stream: RequestStream, delta: OutputDelta) -> bytes:
        return b"data: " + json.dumps(delta.as_dict()).encode() + b"\n\n"

    def end(self) -> bytes:
        return DONE

    def whole(self) -> dict[str, Any]:
        first, *more = [stream.output() for stream in self._streams]
        return first.as_dict() | {"more": [output.as_dict() for output in more]}


async def abort(request: Request) -> Response:
    """End the caller's requests of that id: an answer's id, or the X-Request-Id that a request came with."""
    service: Service = request.app.state.service
    body, _ = await service.read(request)
    service.check(body, (), request)
    name = fields.text(body, "request_id")
    if name is None:
        raise RequestError("request_id is missing; give the id of the answer to end")
    return JSONResponse({"aborted": service.link.abort(f"{request.state.caller}/{name}")})
