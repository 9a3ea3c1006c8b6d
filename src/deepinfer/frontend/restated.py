"""What a body holds that conversion would leave out without a word: said in words that it takes, or refused.

Only what is named here is looked at; conversion refuses the rest of what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.tool_choice import Protocol

# Of an assistant's message in a chat: what it may hold beside its content, and what there is instead.
CHAT_MESSAGE = {"function_call": "give tool_calls", "audio": "give its transcript as content",
                "refusal": "give it as content"}  # fmt: skip
ITEMS = frozenset({
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output",
})  # fmt: skip
RESPONSES_TOOLS = frozenset({"function", "custom", "namespace", "tool_search"})


def restated(body: Mapping[str, Any], protocol: Protocol) -> dict[str, Any]:
    """The body with nothing in it that would get lost. Raises RequestError for what has no other words."""
    match protocol:
        case "chat":
            _check_chat(body.get("messages"))
            return dict(body)
        case "responses":
            _check_responses(body)
            return dict(body)
        case "messages":
            return _messages(body)


def _check_chat(messages: object) -> None:
    for place, message in _objects(messages):
        for name, way_out in CHAT_MESSAGE.items():
            if message.get(name) is not None:
                raise RequestError(f"messages[{place}].{name} is set, but the prompt has no place for it; {way_out}")


def _check_responses(body: Mapping[str, Any]) -> None:
    for place, tool in _objects(body.get("tools")):
        if not _is_one_of(tool.get("type"), RESPONSES_TOOLS):
            raise RequestError(
                f"tools[{place}].type is {shown(tool.get('type'))}; this server runs no tools itself, give functions"
            )
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and str(choice.get("type")).startswith("web_search"):
        raise RequestError(f"tool_choice is {shown(choice)}; this server runs no tools itself, name a function")
    for place, item in _objects(body.get("input")):
        kind = item.get("type", "message")
        if kind == "item_reference":
            raise RequestError(
                f"input[{place}] refers to an item of an earlier answer, but this server keeps no conversations; "
                "send the item itself"
            )
        if not _is_one_of(kind, ITEMS):
            raise RequestError(
                f"input[{place}].type is {shown(kind)}; the prompt has no place for it, give one of "
                f"{', '.join(sorted(ITEMS))}"
            )
        for name in ("content", "output"):
            for number, part in _objects(item.get(name)):
                if part.get("type") == "input_file":
                    raise RequestError(f"input[{place}].{name}[{number}] is a file, which is not read; give its text")


def _messages(body: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(body)
    if isinstance(messages := body.get("messages"), list):
        result["messages"] = [_with_parts(one, f"messages[{i}].content") for i, one in enumerate(messages)]
        last = messages[-1] if messages else None
        if isinstance(last, Mapping) and last.get("role") == "assistant" and body.get("thinking") is None:
            result["thinking"] = {"type": "disabled"}  # the answer has begun already
    if isinstance(tools := body.get("tools"), list):
        result["tools"] = [_plain_tool(tool) for tool in tools]
    return result


def _with_parts(holder: Any, place: str) -> Any:
    """A message or a tool's result with its documents as text."""
    if not isinstance(holder, Mapping) or not isinstance(holder.get("content"), list):
        return holder
    parts: list[Any] = []
    for number, part in enumerate(holder["content"]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "document":
            parts += _document(part, f"{place}[{number}]")
        else:
            parts.append(_with_parts(part, f"{place}[{number}].content") if kind == "tool_result" else part)
    return {**holder, "content": parts}


def _document(part: Mapping[str, Any], place: str) -> list[Any]:
    """The title, the context and the contents of a document, as parts of a message."""
    source = part.get("source")
    source = source if isinstance(source, Mapping) else {}
    citations = part.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        raise RequestError(f"{place}.citations are wanted, but this server makes none; leave them out")
    match source.get("type"), source.get("data"), source.get("content"):
        case "text", str() as text, _:
            contents: list[Any] = [_text(text)]
        case "content", _, str() as text:
            contents = [_text(text)]
        case "content", _, list() as contents:
            pass
        case _:
            raise RequestError(
                f"{place} is a document from {shown(source.get('type'))} ({shown(source.get('media_type'))}), which is "
                'not read; give its text, as in {"type": "text", "media_type": "text/plain", "data": ...}'
            )
    heads = [part[name] for name in ("title", "context") if isinstance(part.get(name), str) and part[name]]
    return [*map(_text, heads), *_with_parts({"content": contents}, f"{place}.source.content")["content"]]


def _plain_tool(tool: Any) -> Any:
    """A tool without the type that says only that the client runs it."""
    if isinstance(tool, Mapping) and "type" in tool and tool["type"] in (None, "custom"):
        return {name: value for name, value in tool.items() if name != "type"}
    return tool


def _text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def _is_one_of(name: object, names: frozenset[str]) -> bool:
    """Whether a value of any type is one of these names."""
    return isinstance(name, str) and name in names


def _objects(items: object) -> list[tuple[int, Mapping[str, Any]]]:
    """The objects of a list and their places; nothing for whatever else."""
    listed = items if isinstance(items, list | tuple) else ()
    return [(place, one) for place, one in enumerate(listed) if isinstance(one, Mapping)]
