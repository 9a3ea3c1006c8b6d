"""Answers in the events of the Messages and Responses APIs, made by `deepseek_recipe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from deepinfer.errors import RequestError
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import Finished, GenerateRequest

RESPONSES: dict[str, Any] = {"messages": recipe.MessagesResponse, "responses": recipe.ResponsesResponse}
FINISHES = {"length": recipe.InferenceFinishReason.Length, "abort": recipe.InferenceFinishReason.Length}


@dataclass(frozen=True)
class ProtocolAnswers:
    """Makes processors for the answers to one request.

    echo, namespaces: what the answers of the Responses API repeat of the request.
    """

    protocol: Literal["messages", "responses"]
    conversion: recipe.ConversationRequest
    echo: recipe.ResponsesEcho | None = None
    namespaces: Mapping[str, tuple[str, str]] | None = None

    @classmethod
    def of(
        cls,
        protocol: Literal["messages", "responses"],
        body: Mapping[str, Any],
        conversion: recipe.ConversationRequest,
        options: recipe.ConversionOptions,
    ) -> ProtocolAnswers:
        """For a body as the client sent it. Raises what the recipe raises for a bad one."""
        if protocol == "messages":
            return cls(protocol, conversion)
        request = recipe.ResponsesRequest(dict(body))
        return cls(protocol, conversion, request.echo(), request.namespace_tool_map(options))

    def processor(
        self, answer_id: str, model: str, tokenizer: recipe.Tokenizer, stops: Sequence[str]
    ) -> recipe.StreamProcessor:
        """For one answer. stops: they end it where the visible text holds one."""
        generator: Any
        if self.protocol == "messages":
            generator = recipe.MessagesRequest.chunk_generator(self.conversion, answer_id, model)
        else:
            generator = recipe.ResponsesRequest.chunk_generator(self.conversion, answer_id, model)
            if self.namespaces:
                generator = generator.with_namespace_tool_map(dict(self.namespaces))
            if self.echo is not None:
                generator = generator.with_echo(self.echo)
        options = self.conversion.parsing_options
        try:
            options.stop_sequences = list(stops)
        except UnicodeEncodeError:
            raise RequestError("stop holds a lone surrogate and has no UTF-8 form; remove it") from None
        options.parse_json_output = False  # a grammar leaves no text around the JSON
        return recipe.StreamProcessor(generator, options, tokenizer)


class ProtocolStream(RequestStream):
    """A `RequestStream` that turns tokens into events as they come.

    Stop strings are the processor's; the engine is told to stop once it has found one.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer | NoTokenizer,
        answers: ProtocolAnswers,
        processor: recipe.StreamProcessor,
        answer_id: str,
        model: str,
        created: int,
    ) -> None:
        """created: seconds since 1970."""
        super().__init__(request, tokenizer)
        self._processor = processor
        self._kind = RESPONSES[answers.protocol]
        num_prompt = len(request.token_ids)
        self._response: Any = self._kind(answer_id, model, created, num_prompt, 0)
        self._events: list[tuple[str | None, str]] = []
        usage = recipe.PromptUsage(prompt_tokens=num_prompt, prompt_cache_hit_tokens=0)
        self._take_events(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    @property
    def wants_stop(self) -> bool:
        """A stop string was found, but the engine has not finished the request yet."""
        return self._processor.finished and not self.is_finished

    def add(self, token_id: int, logprobs: Any = None) -> None:
        """Take the next token; ignored once the answer is complete. Raises RuntimeError if it cannot be read."""
        if self._processor.finished or self.is_finished:
            return
        super().add(token_id, logprobs)
        is_text = token_id not in self._end_ids
        self._push(recipe.InferenceChunk.tokens([token_id]) if is_text else recipe.InferenceChunk.text("", 1))

    def finish(self, finished: Finished) -> None:
        """The engine is done with the request, for whatever reason."""
        if self.is_finished:
            return
        super().finish(finished)
        if not self._processor.finished:
            reason = FINISHES.get(finished.reason, recipe.InferenceFinishReason.Stop)
            self._push(recipe.InferenceChunk.finish(reason))
        self._take_events(self._processor.finish())

    def take_events(self) -> list[tuple[str | None, str]]:
        """(name, JSON) of the events since the last call."""
        events, self._events = self._events, []
        return events

    def response(self) -> str:
        """The answer so far as the JSON of one response."""
        text: str = self._response.to_json()
        return text

    def _push(self, chunk: recipe.InferenceChunk) -> None:
        try:
            self._take_events(self._processor.push(chunk))
        except BaseException as error:  # a panic in native code is no Exception, but is told by its name
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise RuntimeError(f"the answer parser failed: {error}") from None
            raise

    def _take_events(self, events: Sequence[Any]) -> None:
        for event in events:
            self._events.append((self._kind.sse_event_name(event), event.to_json()))
            self._response.accumulate(event)
