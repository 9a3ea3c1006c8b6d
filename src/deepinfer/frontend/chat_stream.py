"""The answer of one chat request as its tokens arrive, parsed into thinking, content and tool calls."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer.frontend.answer import AnswerParser
from deepinfer.frontend.outputs import AnswerDelta, ChatDelta, ChatOutput, OutputDelta, RequestOutput, TokenLogprobs
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import Finished, FinishReason, GenerateRequest


class ChatStream(RequestStream):
    """A `RequestStream` whose deltas and output carry the parsed answer too.

    Stop strings of the request are looked for in the raw text, thinking and markup included; those
    that the parser has, in the content alone. The latter cut the content, not the raw text: tokens
    stay up to the one that completes the stop string.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer | NoTokenizer,
        parser: AnswerParser,
        *,
        sample: int = 0,
        asked_as: str | None = None,
    ) -> None:
        """sample, asked_as: as for a `RequestStream`."""
        super().__init__(request, tokenizer, sample=sample, asked_as=asked_as, keeps_markup=True)
        self._parser = parser
        self._parsed: list[AnswerDelta] = []  # that `take` has not given yet

    @property
    def wants_stop(self) -> bool:
        """A stop string was found, but the engine has not finished the request yet."""
        return super().wants_stop or (self._parser.stop_match is not None and not self.is_finished)

    def add(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next token; ignored once the answer is complete."""
        if self._parser.stop_match is None:
            super().add(token_id, logprobs)

    def finish(self, finished: Finished) -> None:
        """The engine is done with the request, for whatever reason."""
        if not self.is_finished:
            super().finish(finished)
            self._parsed.append(self._parser.finish())

    def take(self) -> ChatDelta | None:
        """What is new since the last call; None if nothing is."""
        delta = super().take()
        if delta is None:
            return None
        parsed, self._parsed = self._parsed, []
        return ChatDelta(**_fields(delta), answer=_joined(parsed))

    def output(self) -> ChatOutput:
        """The whole answer, once the request is finished."""
        parser = self._parser
        return ChatOutput(
            **_fields(super().output()),
            reasoning=parser.reasoning,
            content=parser.content,
            tool_calls=list(parser.tool_calls),
        )

    def _keep(self, text: str) -> None:
        super()._keep(text)
        may_stop = len(self._token_ids) > self.request.params.min_tokens
        if text and (parsed := self._parser.add(text, may_stop=may_stop)):
            self._parsed.append(parsed)

    def _ending(self) -> tuple[FinishReason, str | int | None, str | None]:
        match = self._parser.stop_match
        return super()._ending() if match is None else ("stop", match, None)


def _joined(parts: list[AnswerDelta]) -> AnswerDelta:
    if len(parts) == 1:
        return parts[0]
    return AnswerDelta(
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [call for part in parts for call in part.tool_calls],
    )


def _fields(value: OutputDelta | RequestOutput) -> dict[str, Any]:
    return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
