"""The answer of `/v1/chat/completions`: chunks from prebuilt frames, or one body with the same contents."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from deepinfer.frontend.chat_stream import ChatStream
from deepinfer.frontend.outputs import ChatDelta, ChatOutput, OutputDelta, RequestOutput, ToolCallDelta
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.serve.errors import Dialect
from deepinfer.serve.logprobs import chat_logprobs
from deepinfer.serve.usage import StreamUsage, usage

DONE = b"data: [DONE]\n\n"


class ChatWriter:
    """Of one request; see `Writer`. shows_thinking: False = it is left out. wants_ids: token ids too."""

    dialect: Dialect = "openai"

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        streams: Sequence[ChatStream],
        chat_id: str,
        model: str,
        *,
        is_thinking: bool,
        shows_thinking: bool,
        stream_usage: StreamUsage,
        wants_ids: bool,
    ) -> None:
        self._tokenizer, self._streams = tokenizer, streams
        self._think_end = tokenizer.think_end_id if is_thinking else None
        self._shows_thinking, self._stream_usage, self._wants_ids = shows_thinking, stream_usage, wants_ids
        self._head = {"id": chat_id, "created": int(time.time()), "model": model}
        head = json.dumps(self._head | {"object": "chat.completion.chunk"})
        self._frame = f"data: {head[:-1]}, ".encode()
        self._has_calls = [False for _ in streams]

    def start(self) -> bytes:
        """The role of each answer."""
        frames = []
        for stream in self._streams:
            extra: dict[str, Any] = {}
            if self._wants_ids and stream.sample == 0:
                extra["prompt_token_ids"] = stream.request.token_ids.tolist()
            frames.append(self._chunk(stream.sample, {"role": "assistant", "content": ""}, **extra))
        return b"".join(frames)

    def add(self, stream: RequestStream, delta: OutputDelta) -> bytes:
        """Thinking, content and calls in the order in which they come in an answer; then the finish reason."""
        assert isinstance(delta, ChatDelta)
        answer = delta.answer
        parts: list[dict[str, Any]] = []
        if answer.reasoning and self._shows_thinking:
            parts.append({"reasoning_content": answer.reasoning, "reasoning": answer.reasoning})
        if answer.content:
            parts.append({"content": answer.content})
        if answer.tool_calls:
            self._has_calls[delta.sample] = True
            parts.append({"tool_calls": [_call_delta(call) for call in answer.tool_calls]})
        extra: dict[str, Any] = {}
        if self._wants_ids and delta.token_ids:
            extra["token_ids"] = delta.token_ids
        if delta.logprobs:
            extra["logprobs"] = chat_logprobs(delta.logprobs, self._tokenizer)
        if extra and not parts:
            parts.append({})
        frames = [
            self._chunk(delta.sample, part, **(extra if number == 0 else {})) for number, part in enumerate(parts)
        ]
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, self._has_calls[delta.sample])
            frames.append(self._chunk(delta.sample, {}, finish_reason=reason, stop_reason=self._stop(delta)))
        return b"".join(frames)

    def end(self) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._stream_usage.at_end:
            return DONE
        tail = json.dumps({"choices": [], "usage": self._usage()})
        return self._frame + tail[1:].encode() + b"\n\n" + DONE

    def whole(self) -> dict[str, Any]:
        """One body with all answers."""
        choices = [self._choice(stream.output(), stream.sample) for stream in self._streams]
        body = self._head | {"object": "chat.completion", "choices": choices}
        if self._wants_ids:
            body["prompt_token_ids"] = self._streams[0].request.token_ids.tolist()
        return body | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        think_end = self._think_end
        num_reasoning = 0 if think_end is None else sum(one.num_tokens_before(think_end) for one in self._streams)
        return usage(self._streams, num_reasoning)

    def _stop(self, value: OutputDelta | RequestOutput) -> str | int | None:
        """The stop string or token that the request named; None for the model's own end."""
        return None if value.stop_reason in self._tokenizer.eos_ids else value.stop_reason

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None} | more
        told = self._stream_usage.in_chunk(self._usage)
        return self._frame + b'"choices": [' + json.dumps(choice).encode() + b"]" + told + b"}\n\n"

    def _choice(self, output: ChatOutput, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.content}
        if output.reasoning and self._shows_thinking:
            message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        if output.tool_calls:
            message["content"] = output.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in output.tool_calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if output.logprobs is None else chat_logprobs(output.logprobs, self._tokenizer),
            "finish_reason": finish_reason(output.finish_reason, bool(output.tool_calls)),
            "stop_reason": self._stop(output),
        }
        return choice | ({"token_ids": output.token_ids} if self._wants_ids else {})


def finish_reason(reason: str, has_calls: bool) -> str:
    """The protocol's word: an answer that ends with calls ends for them."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments} | ({} if call.name is None else {"name": call.name})
    own = {} if call.id is None else {"id": call.id, "type": "function"}
    return {"index": call.index, **own, "function": function}
