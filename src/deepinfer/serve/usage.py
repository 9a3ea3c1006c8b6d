"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.frontend.stream import RequestStream


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
