"""Log-probabilities in the shapes of OpenAI's APIs. JSON has no -infinity; it becomes the least that clients expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepinfer.frontend.outputs import TokenLogprobs
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer

LEAST = -9999.0
AnyTokenizer = Tokenizer | NoTokenizer


def chat_logprobs(lines: Sequence[TokenLogprobs], tokenizer: AnyTokenizer) -> dict[str, Any]:
    """As in Chat Completions: every token of the answer, thinking and markup included."""
    return {
        "content": [
            {
                **_token(tokenizer, line.token_id, line.logprob),
                "top_logprobs": [_token(tokenizer, token_id, value) for token_id, value in line.top],
            }
            for line in lines
        ],
        "refusal": None,
    }


def completion_logprobs(
    lines: Sequence[TokenLogprobs | None], token_ids: Sequence[int], tokenizer: AnyTokenizer, first_offset: int
) -> dict[str, Any]:
    """As in Completions. lines: None for the first token of a prompt. first_offset: characters before them."""
    texts = [_text(tokenizer.spelling(token_id)) for token_id in token_ids]
    offsets, offset = [], first_offset
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if line is None else _finite(line.logprob) for line in lines],
        "tokens": texts,
        "top_logprobs": [
            None if line is None else {_text(tokenizer.spelling(one)): _finite(value) for one, value in line.top}
            for line in lines
        ],
    }


def _token(tokenizer: AnyTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.spelling(token_id)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": [*data]}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(value: float) -> float:
    return max(value, LEAST) if value > -math.inf else LEAST
