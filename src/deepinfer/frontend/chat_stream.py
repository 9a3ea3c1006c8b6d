"""The answer of one chat request as its tokens arrive, parsed into thinking, content and tool calls."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer.frontend.answer import AnswerParser
from deepinfer.frontend.outputs import AnswerDelta, ChatDelta, ChatOutput, OutputDelta, RequestOutput
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import GenerateRequest


class ChatStream(RequestStream):
    """A `RequestStream` whose deltas and output carry the parsed answer too.

    Stop strings are looked for in the raw text, thinking and markup included.
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

    def take(self) -> ChatDelta | None:
        """What is new since the last call; None if nothing is."""
        delta = super().take()
        if delta is None:
            return None
        answer = self._parser.add(delta.text)
        if delta.finish_reason is not None:
            answer = _joined(answer, self._parser.finish())
        return ChatDelta(**_fields(delta), answer=answer)

    def output(self) -> ChatOutput:
        """The whole answer, once the request is finished. What `take` has not given yet is taken."""
        output = super().output()
        self.take()
        parser = self._parser
        return ChatOutput(
            **_fields(output), reasoning=parser.reasoning, content=parser.content, tool_calls=list(parser.tool_calls)
        )


def _joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    return AnswerDelta(
        first.reasoning + second.reasoning, first.content + second.content, first.tool_calls + second.tool_calls
    )


def _fields(value: OutputDelta | RequestOutput) -> dict[str, Any]:
    return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
