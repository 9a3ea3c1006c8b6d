"""Answer text to thinking, content and tool calls, by the stream processor of `deepseek_recipe`.

Whatever the model writes is accepted: text that is no proper markup becomes content. Should the
processor itself fail, the rest of the answer becomes content as it is; what the processor was
holding back is then in the raw text only.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import deepseek_recipe as recipe

from deepinfer import log
from deepinfer.frontend.outputs import AnswerDelta, ToolCall, ToolCallDelta
from deepinfer.frontend.stops import StopStrings


class Processor(Protocol):
    """What is used of `deepseek_recipe.StreamProcessor`."""

    def push(self, chunk: recipe.InferenceChunk) -> list[Any]: ...
    def finish(self) -> list[Any]: ...


class AnswerParser:
    """Parses one answer from its text deltas; the result does not depend on how the text was cut.

    reasoning, content, tool_calls: everything so far.
    """

    def __init__(self, processor: Processor, *, is_json: bool = False, stops: StopStrings | None = None) -> None:
        """is_json: the request asked for JSON, so text around the JSON is dropped.

        stops: the first of these in the content ends the answer; what comes after it is dropped.
        """
        self._stops = stops
        self._processor: Processor | None = processor
        self._is_json = is_json
        self._may_stop, self._is_begun = True, False
        self._spaces = ""  # at the end of JSON content, until it is known that something follows
        self.reasoning = ""
        self.content = ""
        self.tool_calls: list[ToolCall] = []

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the content."""
        return None if self._stops is None else self._stops.match

    def add(self, text: str, *, may_stop: bool = True) -> AnswerDelta:
        """Take the next piece of the answer. may_stop: a stop string that ends in it counts."""
        self._may_stop = may_stop
        if self._processor is None:
            return self._collect([{"content": text}])
        # The recipe turns text around JSON into spaces, as many as it sees pieces: give it single characters.
        pieces = list(text) if self._is_json else [text] * bool(text)
        deltas: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            try:
                deltas += _read(self._processor.push(recipe.InferenceChunk.text(piece)))
            except BaseException as error:
                self._give_up(error)
                deltas.append({"content": "".join(pieces[number:])})
                break
        return self._collect(deltas)

    def finish(self) -> AnswerDelta:
        """The answer is complete: give what was held back."""
        deltas: list[dict[str, Any]] = []
        try:
            if self._processor is not None:
                deltas = _read(self._processor.finish())
        except BaseException as error:
            self._give_up(error)
        return self._collect(deltas, is_end=True)

    def _give_up(self, error: BaseException) -> None:
        """Go on without the processor. A panic in native code is no Exception, but is told by its name."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        log.get(__name__).warning(
            "the answer parser failed (%s: %s); the rest is plain text", type(error).__name__, error
        )
        self._processor = None

    def _collect(self, deltas: list[dict[str, Any]], *, is_end: bool = False) -> AnswerDelta:
        if self.stop_match is not None:
            return AnswerDelta()
        content = "".join(delta.get("content") or "" for delta in deltas)
        if self._is_json:
            content = self._trimmed(content)
        if self._stops is not None:
            content = self._stops.add(content, may_end=self._may_stop) + (self._stops.flush() if is_end else "")
        is_over = self.stop_match is not None
        calls = [_call_delta(call) for delta in deltas for call in delta.get("tool_calls") or ()]
        delta = AnswerDelta(
            reasoning="".join(delta.get("reasoning_content") or "" for delta in deltas),
            content=content,
            tool_calls=[] if is_over else calls,
        )
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.tool_calls:
            self._add_call(call)
        return delta

    def _trimmed(self, content: str) -> str:
        """Without spaces before the first and after the last other character of the whole content."""
        content = self._spaces + content
        if not self._is_begun:
            content = content.lstrip()
        kept = content.rstrip()
        self._is_begun |= bool(kept)
        self._spaces = content[len(kept) :]
        return kept

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.index == len(self.tool_calls):
            self.tool_calls.append(ToolCall(call.id or "", call.name or "", call.arguments))
        else:
            old = self.tool_calls[call.index]
            self.tool_calls[call.index] = ToolCall(old.id, old.name, old.arguments + call.arguments)


def _read(chunks: list[Any]) -> list[dict[str, Any]]:
    """The message deltas of Chat Completions chunks."""
    return [choice["delta"] for chunk in chunks for choice in json.loads(chunk.to_json())["choices"]]


def _call_delta(call: dict[str, Any]) -> ToolCallDelta:
    function = call.get("function") or {}
    return ToolCallDelta(call["index"], call.get("id"), function.get("name"), function.get("arguments") or "")
