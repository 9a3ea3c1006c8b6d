"""How many tokens a request took."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.frontend.stream import RequestStream
from deepinfer.serve import fields


def usage(streams: Sequence[RequestStream], num_reasoning: int | None = None) -> dict[str, Any]:
    """The `usage` of OpenAI's APIs. The answers to one prompt count it once.

    num_reasoning: tokens of thinking in all answers; None where nobody tells them apart.
    """
    prompts = {id(stream.request.token_ids): stream for stream in streams}.values()  # its answers share the array
    num_prompt = sum(len(stream.request.token_ids) for stream in prompts)
    num_answer = sum(stream.num_tokens for stream in streams)
    result: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in prompts)},
    }
    if num_reasoning is not None:
        result["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return result


@dataclass(frozen=True)
class StreamUsage:
    """Where a stream of OpenAI's APIs tells the usage.

    at_end: in a last chunk of its own. in_all: in every chunk, as far as it is.
    """

    at_end: bool
    in_all: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> StreamUsage:
        """As `stream_options` wants it. Raises RequestError, also where nothing is streamed."""
        options = fields.mapping(body, "stream_options")
        if options and not fields.switch(body, "stream"):
            raise RequestError("stream_options is set but stream is not; leave it out or set stream")
        at_end = fields.switch(options, "include_usage")
        return cls(at_end, at_end and fields.switch(options, "continuous_usage_stats"))

    def in_chunk(self, tell: Callable[[], dict[str, Any]]) -> bytes:
        """The field of a chunk with choices. tell: makes the usage so far."""
        if self.in_all:
            return b', "usage": ' + json.dumps(tell()).encode()
        return b', "usage": null' if self.at_end else b""
