"""What `/v1/messages` and `/v1/responses` share: answers whose events deepseek-recipe makes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from deepinfer.frontend.chat import ChatPrompt
from deepinfer.frontend.outputs import OutputDelta
from deepinfer.frontend.protocol_answers import ProtocolStream
from deepinfer.frontend.stream import RequestStream
from deepinfer.sampling.params import SamplingParams
from deepinfer.serve import fields
from deepinfer.serve.errors import Dialect
from deepinfer.serve.service import Service

NOT_HERE = ("n", "stop", "logprobs", "top_logprobs", "prompt_logprobs")  # sampling fields that these protocols lack


def protocol_stream(
    service: Service,
    body: Mapping[str, Any],
    prompt: ChatPrompt,
    params: SamplingParams,
    answer_id: str,
    *,
    lowers_max_tokens: bool = False,
) -> ProtocolStream:
    """The answer to an encoded conversation; `lowers_max_tokens` as in `RequestBuilder.build`. Raises RequestError."""
    assert prompt.answers is not None, "a prompt of one of these protocols"
    stops = params.stop
    params = prompt.constrained(dataclasses.replace(params, stop=()), service.tokenizer.think_end_id)
    (made,) = service.request(body, prompt.token_ids, params, images=prompt.images, lowers_max_tokens=lowers_max_tokens)
    model = fields.text(body, "model") or service.names[0]
    processor = prompt.answers.processor(answer_id, model, service.chats.tokenizer, stops)
    return ProtocolStream(made, service.tokenizer, prompt.answers, processor, answer_id, model, int(time.time()))


class EventWriter:
    """The events of one answer; see `Writer`."""

    def __init__(self, stream: ProtocolStream, dialect: Dialect) -> None:
        self._stream, self.dialect = stream, dialect

    def start(self) -> bytes:
        """What comes before the first token."""
        return self._take()

    def add(self, stream: RequestStream, delta: OutputDelta) -> bytes:
        """What the new tokens gave."""
        return self._take()

    def end(self) -> bytes:
        """Nothing: the last events come with the end of the answer."""
        return b""

    def whole(self) -> dict[str, Any]:
        """The events put together."""
        body: dict[str, Any] = json.loads(self._stream.response())
        return body

    def _take(self) -> bytes:
        return b"".join(frame(name, text) for name, text in self._stream.take_events())


def frame(name: str | None, text: str) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"
