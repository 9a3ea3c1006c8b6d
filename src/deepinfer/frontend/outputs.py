"""What a caller gets back: whole answers, and pieces of them while they are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from deepinfer.messages import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) of one token; of what, `SamplingParams.logprobs_mode` says.

    logprob: -infinity, which JSON has as null, where a given token (`golden_token_ids`) is excluded.
    rank: 1 = the likeliest. top: (token id, logprob), best first, as many as were asked for and are
    possible.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What is new since the last delta; all deltas of a request together are its RequestOutput.

    sample: which of the `n` answers to the prompt goes on; each has a last delta of its own.
    prompt_logprobs: with the first delta, if the request asked for them.
    finish_reason: None until the last delta.
    """

    request_id: str
    sample: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        return dataclasses.asdict(self, dict_factory=_with_null)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one request; the first one if it asked for several.

    more: the other answers, `n` - 1 of them.
    token_ids: with the end-of-sequence or stop token if one ended the answer (its text is not in
        `text`, unless asked for); cut together with `text` if a stop string did.
    finish_reason: "stop", "length", "abort", or "error" with the cause in `error`.
    stop_reason: the stop string or the id of the stop token that ended the answer.
    logprobs: one per token id, None if the request did not ask.
    prompt_logprobs: one per token of the prompt, None for its first one; the same in no answer but
        the first.
    num_generated_tokens: what the engine produced for the answer, tokens that were cut included.
    num_checked_drafts, num_accepted_drafts: drafted tokens that were checked for it, and those that it kept.
    queue_seconds, first_token_seconds, total_seconds: from arrival until the request was first
        scheduled, had its first token, was finished; None where it never got that far.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    more: Sequence[Self] = ()
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_checked_drafts: int = 0
    num_accepted_drafts: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the request never ran, `error` says why."""
        return self.finish_reason == "error" and self.queue_seconds is None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def outputs(self) -> list[Self]:
        """All answers to the prompt, this one first."""
        return [self, *self.more]

    @classmethod
    def refused(cls, request_id: str, error: str) -> Self:
        """The answer to a request that never reached the engine."""
        return cls(
            request_id=request_id, prompt_token_ids=[], text="", token_ids=[], finish_reason="error", error=error
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        own = dataclasses.asdict(dataclasses.replace(self, more=()), dict_factory=_with_null)
        more = [answer.as_dict() for answer in self.more]
        return {**own, "more": more, "num_prompt_tokens": self.num_prompt_tokens}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. arguments: a JSON object as text, as far as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the tool call number `index`: id and name come first, then arguments bit by bit."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new in a chat answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta(OutputDelta):
    """A delta of a chat answer: the raw text, and what it adds to the parsed answer."""

    answer: AnswerDelta = field(default_factory=AnswerDelta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput(RequestOutput):
    """A chat answer: the raw `text`, and the same parsed into thinking, content and tool calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def _with_null(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON has no -infinity."""
    return {name: None if value == -math.inf else value for name, value in items}
