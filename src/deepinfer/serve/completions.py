"""`/v1/completions`: texts that go on from texts or token ids."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.images import data_url_images
from deepinfer.frontend.outputs import OutputDelta, TokenLogprobs
from deepinfer.frontend.stream import RequestStream
from deepinfer.serve import fields
from deepinfer.serve.chat_writer import DONE
from deepinfer.serve.errors import Dialect
from deepinfer.serve.logprobs import completion_logprobs
from deepinfer.serve.service import Service
from deepinfer.serve.usage import StreamUsage, usage

OWN = frozenset({"prompt", "images", "echo", "suffix", "best_of", "stream_options"})
REFUSED = {"suffix": "this model cannot fill in between two texts; leave it out"}
DEFAULT_MAX_TOKENS = 16  # of this API, unlike the others'


async def create(request: Request) -> Response:
    """Continue each prompt."""
    service: Service = request.app.state.service
    body, is_big = await service.read(request)
    service.check(body, OWN, request, refused=REFUSED, fixed=service.fixed_of_texts)
    answer_id, known_as = service.ids(body, request, "cmpl-")
    streams = await service.work(is_big, lambda: _streams(service, body))
    is_stream = fields.switch(body, "stream")
    writer = CompletionWriter(
        service, streams, answer_id, fields.text(body, "model") or service.names[0],
        stream_usage=StreamUsage.of(body),
        is_echo=fields.switch(body, "echo"),
        wants_ids=fields.switch(body, "return_token_ids"),
    )  # fmt: skip
    return service.answer(service.link.open(streams, known_as), writer, is_stream=is_stream)


def _streams(service: Service, body: Mapping[str, Any]) -> list[RequestStream]:
    params = fields.sampling_params(body, service.defaults)
    if all(body.get(name) is None for name in fields.MAX_TOKENS):
        params = dataclasses.replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
    if body.get("best_of") not in (None, params.n):
        raise RequestError(f"best_of is {shown(body['best_of'])}; it must be n or left out")
    is_echo = fields.switch(body, "echo")
    if params.prompt_logprobs is not None and not (is_echo and params.prompt_logprobs == params.logprobs):
        raise RequestError(
            "prompt_logprobs is set; set echo and the same number as logprobs to get them, or use /generate"
        )
    if is_echo and params.logprobs is not None:
        params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
    prompts = _prompts(body.get("prompt"))
    images = data_url_images(body.get("images"))
    if images and len(prompts) > 1:
        raise RequestError(f"images are given beside {len(prompts)} prompts; send each prompt with its images alone")
    service.check_count(len(prompts) * params.n)
    streams = []
    for number, prompt in enumerate(prompts):
        streams += [
            RequestStream(one, service.tokenizer, sample=number * params.n + sample)
            for sample, one in enumerate(service.request(body, prompt, params, images=images))
        ]
    return streams


def _prompts(value: object) -> list[Any]:
    """A text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str | list) for one in value):
            return value
        return [value]
    raise RequestError(f"prompt is {shown(value)}; it must be a text, a list of token ids, or a list of either")


class CompletionWriter:
    """Of one request; see `Writer`."""

    dialect: Dialect = "openai"

    def __init__(
        self,
        service: Service,
        streams: Sequence[RequestStream],
        answer_id: str,
        model: str,
        *,
        stream_usage: StreamUsage,
        is_echo: bool,
        wants_ids: bool,
    ) -> None:
        self._tokenizer, self._streams = service.tokenizer, streams
        self._stream_usage, self._is_echo, self._wants_ids = stream_usage, is_echo, wants_ids
        self._head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._frame = f"data: {json.dumps(self._head)[:-1]}, ".encode()
        self._lengths = [0 for _ in streams]
        self._has_begun = [False for _ in streams]

    def start(self) -> bytes:
        """Nothing: the first chunk of an answer comes with its first text."""
        return b""

    def add(self, stream: RequestStream, delta: OutputDelta) -> bytes:
        """The next text of one answer."""
        choice = self._choice(stream, delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        told = self._stream_usage.in_chunk(lambda: usage(self._streams))
        return self._frame + b'"choices": [' + json.dumps(choice).encode() + b"]" + told + b"}\n\n"

    def end(self) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._stream_usage.at_end:
            return DONE
        tail = json.dumps({"choices": [], "usage": usage(self._streams)})
        return self._frame + tail[1:].encode() + b"\n\n" + DONE

    def whole(self) -> dict[str, Any]:
        """One body with all answers."""
        choices = []
        for stream in self._streams:
            output = stream.output()
            choice = self._choice(stream, output.text, output.token_ids, output.logprobs, output.prompt_logprobs)
            choices.append(choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason})
        return self._head | {"choices": choices, "usage": usage(self._streams)}

    def _choice(
        self,
        stream: RequestStream,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        """What is new in an answer; the prompt is part of the first piece if it is to be echoed."""
        index, prompt_ids = stream.sample, stream.request.token_ids.tolist()
        is_first, self._has_begun[index] = not self._has_begun[index], True
        lines: list[TokenLogprobs | None] = [*(logprobs or ())]
        line_ids, offset = token_ids, self._lengths[index]
        if is_first and self._is_echo:
            text = self._tokenizer.decode(prompt_ids) + text
            if logprobs is not None and prompt_logprobs is not None:
                lines, line_ids = [*prompt_logprobs, *lines], [*prompt_ids, *token_ids]
        self._lengths[index] += len(text)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if logprobs is not None:
            choice["logprobs"] = completion_logprobs(lines, line_ids, self._tokenizer, offset)
        if self._wants_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt_ids
        return choice
