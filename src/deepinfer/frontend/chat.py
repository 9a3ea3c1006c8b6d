"""Chat messages to token ids, by the public `deepseek_recipe` package: it owns the V4.1 prompt format.

Text of users and tools is encoded without the special vocabulary, so a spelling like `<｜User｜>`
in a message can never open a turn.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import deepseek_recipe as recipe

from deepinfer.errors import ModelError, RequestError, shown
from deepinfer.frontend.answer import AnswerParser
from deepinfer.frontend.images import PromptImage
from deepinfer.frontend.protocol_answers import ProtocolAnswers
from deepinfer.frontend.restated import restated
from deepinfer.frontend.stops import StopStrings
from deepinfer.frontend.tool_choice import Form, Protocol, ToolChoice, split_tool_choice
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import Constraint

Message: TypeAlias = Mapping[str, Any]
Effort: TypeAlias = Literal["low", "high", "xhigh", "max"]
Fetch: TypeAlias = Callable[[Sequence[tuple[str, str]]], list[bytes]]  # images of (url, name in errors)

EFFORTS = ("low", "high", "xhigh", "max")
# What shapes the prompt in a body of each protocol; sampling fields are not read here.
PROMPT_FIELDS: dict[Protocol, tuple[str, ...]] = {
    "chat": (
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "thinking",
        "reasoning_effort",
        "response_format",
    ),
    "messages": ("messages", "system", "tools", "tool_choice", "thinking", "output_config"),
    "responses": ("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text"),
}
# What an answer of the Responses API repeats of its body, beside those.
REPEATED = ("max_output_tokens", "temperature", "top_p", "user")
REQUESTS: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "messages": recipe.MessagesRequest,
    "responses": recipe.ResponsesRequest,
}
MODEL_NAME = "deepinfer"  # the recipe picks the prompt format by name; every model here speaks V4.1


@dataclass(frozen=True)
class ChatPrompt:
    """An encoded conversation.

    token_ids: the prompt up to where the answer begins, with one image token for each of the images.
    tool_choice: which tools the answer may or must call. form: of its content, where conversion does not know it.
    answers: makes the events of the protocol's answer.
    """

    token_ids: list[int]
    conversion: recipe.ConversationRequest
    images: tuple[PromptImage, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    form: Form | None = None
    answers: ProtocolAnswers | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether the answer begins inside the thinking."""
        stages = recipe.ThinkingInitialStage.ReasoningStart, recipe.ThinkingInitialStage.ReasoningContinuation
        return self.conversion.parsing_options.thinking_initial_stage in stages

    def constrained(self, params: SamplingParams, think_end_id: int | None) -> SamplingParams:
        """The parameters with the grammar of response format and tools; it begins when thinking ends.

        Raises RequestError for what cannot be enforced, or beside another grammar.
        """
        grammar = self.tool_choice.grammar(self._tools, self.form or self._response_form)
        if grammar is not None:
            if params.constraint is not None:
                raise RequestError(
                    "the sampling parameters and one of response_format, tool_choice and a strict tool both give a "
                    "grammar; give one of them"
                )
            params = dataclasses.replace(params, structured_outputs=grammar)
        constraint = params.constraint
        if constraint is None or constraint.trigger or think_end_id is None or not self.is_thinking:
            return params
        after_thinking = Constraint(constraint.grammar, trigger=(think_end_id,), must_begin=True)
        return dataclasses.replace(params, structured_outputs=None, so_args=after_thinking)

    @property
    def _tools(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        stated = self.conversion.inference_options.output_constraint
        if stated is None or stated.kind != "tool_call":
            return []
        return [tool["function"] for tool in json.loads(stated.schema)]

    @property
    def _response_form(self) -> Form | None:
        """What `response_format` or its like asks of the content."""
        conversation = self.conversion.conversation
        match conversation.response_format:
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                return {"json": conversation.response_schema}
            case "regex":
                return {"regex": conversation.response_regex}
        return None

    def parser(self, stops: StopStrings | None = None) -> AnswerParser:
        """A new parser for one answer to this prompt. stops: end the answer where the content holds one."""
        generator = recipe.ChatCompletionRequest.chunk_generator(self.conversion, "answer", MODEL_NAME)
        options = self.conversion.parsing_options
        processor = recipe.StreamProcessor(generator, options)
        return AnswerParser(processor, is_json=options.parse_json_output, stops=stops)


class ChatEncoder:
    """Encodes conversations for one model folder; the tokenizer is read on first use.

    default_thinking: for bodies that do not say whether to think. fetch: downloads images; None = URLs are refused.
    """

    def __init__(self, tokenizer_file: Path, *, default_thinking: bool = True, fetch: Fetch | None = None) -> None:
        self._tokenizer_file, self._fetch = tokenizer_file, fetch
        versions = {MODEL_NAME: recipe.ModelVersion.DeepseekV41Flash}
        options = recipe.ConversionOptions().with_model_versions_by_name(versions)
        self._options = options.with_default_thinking_mode(default_thinking)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        effort: Effort | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """Encode messages, tools and formats in the shape of the Chat Completions API.

        messages: role system (or developer), user, assistant or tool; content a text or a list of parts;
            an assistant may have `reasoning_content` (or `reasoning`) and `tool_calls`, a tool has
            `tool_call_id`. A part is {"type": "text", "text": ...},
            {"type": "image_url", "image_url": {"url": a data URL}} or
            {"type": "image", "image": a path, bytes, picture or data URL}; images may have a `detail`.
        effort: how much to think, "high" when not given.
        tools: as in {"type": "function", "function": {"name": ..., "parameters": {...}}}.
        response_format: {"type": "text" | "json_object"}, or "json_schema" or "regex" with their field.
        continue_final_message: the answer goes on with the last message, which is the assistant's.

        Raises RequestError for whatever cannot be encoded.
        """
        if not isinstance(thinking, bool):
            raise RequestError(f"thinking is {thinking!r:.80}; it must be true or false")
        if effort is not None and effort not in EFFORTS:
            raise RequestError(f"effort is {effort!r:.80}; it must be one of {', '.join(EFFORTS)}")
        if effort is not None and not thinking:
            raise RequestError(f"effort is {effort!r} but thinking is off; turn thinking on or leave effort out")
        messages, given = _with_urls(_checked(messages))
        if continue_final_message:
            messages = _continued(messages)
        body = {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "reasoning_effort": effort,
            "response_format": response_format,
        }
        return self._encode({name: value for name, value in body.items() if value is not None}, given=given)

    def encode_body(
        self,
        body: Mapping[str, Any],
        protocol: Protocol = "chat",
        *,
        continue_final_message: bool = False,
        form: Form | None = None,
    ) -> ChatPrompt:
        """Encode the prompt fields of a body, whatever model it names; images come as data URLs only.

        continue_final_message: as in `encode`; for chats only. form: as in `ChatPrompt`.
        Raises RequestError as `encode` does.
        """
        fields = {name: body[name] for name in PROMPT_FIELDS[protocol] if body.get(name) is not None}
        if protocol == "chat":
            messages = _checked(body.get("messages"))
            fields["messages"] = _continued(messages) if continue_final_message else messages
        repeated = {name: body[name] for name in REPEATED if protocol == "responses" and body.get(name) is not None}
        return dataclasses.replace(self._encode(fields, protocol, repeated=repeated), form=form)

    def parser(self, is_thinking: bool) -> AnswerParser:
        """A new parser for an answer that may hold calls of any tools."""
        tools = [{"type": "function", "function": {"name": "any"}}]
        return self.encode([{"role": "user", "content": ""}], tools=tools, thinking=is_thinking).parser()

    @cached_property
    def tokenizer(self) -> recipe.Tokenizer:
        """The recipe's own view of the tokenizer. Raises ModelError for a file that it cannot read."""
        try:
            return recipe.Tokenizer.from_file(str(self._tokenizer_file))
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(f"{self._tokenizer_file} cannot be read as a tokenizer ({error})") from None

    @cached_property
    def _encoding(self) -> recipe.DeepseekV41Encoding:
        return recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)

    def _images(
        self, conversion: recipe.ConversationRequest, given: Mapping[str, PromptImage]
    ) -> tuple[PromptImage, ...]:
        """In the order of their tokens. given: images by the URL that stands for them."""
        if not any(message.image_sources for message in conversion.conversation.messages):
            return ()
        sources = self._encoding.render_conversation(conversion.conversation).image_sources
        names = [f"image {number} ({source.path.lstrip('.')})" for number, source in enumerate(sources, 1)]
        pairs = [*zip(sources, names, strict=True)]
        fetched = iter(self._fetched([(source.url or "", name) for source, name in pairs if source.data_url is None]))
        return tuple(
            PromptImage(next(fetched), name, source.detail)
            if source.data_url is None
            else given.get(source.data_url) or PromptImage(source.data_url, name, source.detail)
            for source, name in pairs
        )

    def _fetched(self, images: Sequence[tuple[str, str]]) -> list[bytes]:
        if not images:
            return []
        if self._fetch is None:
            url, name = images[0]
            raise RequestError(
                f"{name} is at {shown(url)}; this engine downloads no images, give a data URL with its bytes"
            )
        return self._fetch(images)

    def _encode(
        self,
        body: dict[str, Any],
        protocol: Protocol = "chat",
        given: Mapping[str, PromptImage] | None = None,
        repeated: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        try:
            named = {**restated(body, protocol), "model": MODEL_NAME}
            plain, choice = split_tool_choice(named, protocol)
            conversion = REQUESTS[protocol](plain).convert(self._options)
            images = self._images(conversion, given or {})
            told = {**named, **(repeated or {})}
            answers = None if protocol == "chat" else ProtocolAnswers.of(protocol, told, conversion, self._options)
            conversation = conversion.conversation
            if protocol == "messages":
                conversation = _going_on(conversation)
            return ChatPrompt(self._encoding.encode(conversation), conversion, images, choice, answers=answers)
        except recipe.ConversionError as error:
            raise RequestError(f"chat request refused: {error}") from None
        except UnicodeEncodeError:
            raise RequestError(
                "chat request holds a lone surrogate and has no UTF-8 form; remove it or replace it with U+FFFD"
            ) from None
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, RequestError | ModelError):
                raise
            raise RequestError(f"chat request refused: {error}") from None


def _checked(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages is {messages!r:.80}; it must be a list, as in [{{"role": "user", "content": "Hello"}}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] is {message!r:.80}; it must have a role and content")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    """A message in the words of the prompt format: `developer` is a system message, `reasoning` its older name."""
    plain = dict(message)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain.get("reasoning_content") is None and plain.get("reasoning") is not None:
        plain["reasoning_content"] = plain.pop("reasoning")
    return plain


def _continued(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last message marked as the beginning of the answer."""
    role = messages[-1]["role"]
    if role != "assistant":
        raise RequestError(
            f"continue_final_message is set but the last message has role {role!r:.80}; it must be assistant"
        )
    return [*messages[:-1], {**messages[-1], "prefix": True}]


def _going_on(conversation: recipe.Conversation) -> recipe.Conversation:
    """The conversation, whose last message the answer goes on with if it is text of the assistant's."""
    *earlier, last = conversation.messages
    if last.role != "assistant" or last.tool_calls:
        return conversation
    if conversation.thinking_mode:
        raise RequestError(
            "messages end with the assistant's, which the answer goes on with, but thinking is on and would come "
            "first; turn thinking off or end with the user's"
        )
    return recipe.Conversation(
        [*earlier, recipe.AssistantMessage(last.content, prefix=True)],
        thinking_mode=False,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
    )


def _with_urls(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, PromptImage]]:
    """The messages with a short URL for each image that is given as it is, and those images by their URL.

    The URLs hold a secret, so that no other part of a message can mean one of them.
    """
    secret, given = secrets.token_hex(8), dict[str, PromptImage]()

    def part_of(part: Any, place: str) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
            return part
        url = f"data:image/png;base64,{secret}{len(given):08d}"
        given[url] = PromptImage(part["image"], f"image {len(given) + 1} ({place})", part.get("detail", "high"))
        return {"type": "image_url", "image_url": {"url": url}}

    replaced = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [part_of(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
            message = {**message, "content": parts}
        replaced.append(message)
    return replaced, given
