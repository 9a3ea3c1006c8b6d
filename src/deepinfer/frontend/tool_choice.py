"""`tool_choice` that demands a call: read from the body of each protocol, and enforced by a grammar.

The prompt format knows no such demand while the model thinks. So the prompt is made as for "auto", in every
mode, and the grammar leaves the answer (after its thinking) no other way than a block of calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.tokenizer import TOOL_MARKUP as MARK
from deepinfer.structured.grammar import Grammar, read_structured_outputs

Protocol: TypeAlias = Literal["chat", "responses", "messages"]

CALLS_BEGIN, CALLS_END = f"\n\n<{MARK} calls>\n", f"</{MARK} calls>"
INVOKE_BEGIN, INVOKE_END = f'<{MARK} invoke name="%s">\n', f"</{MARK} invoke>\n"
PARAMETER_STYLE = "deepseek_v4_1_xml"  # xgrammar's name for V4.1's parameters of a call
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Demand:
    """The answer must call a tool. name: this one; None = any. is_single: one call, not several."""

    name: str | None
    is_single: bool

    def grammar(self, tools_text: str) -> Grammar:
        """The block of calls. tools_text: the tools as a JSON list, as conversion gives them.

        Raises RequestError when there is no such tool, or its parameters cannot be enforced.
        """
        tools = [tool["function"] for tool in json.loads(tools_text or "[]")]
        chosen = [tool for tool in tools if self.name is None or tool["name"] == self.name]
        if not chosen:
            names = ", ".join(tool["name"] for tool in tools) or "none"
            wanted = "a call" if self.name is None else shown(self.name)
            raise RequestError(f"tool_choice demands {wanted}, but the tools of the request are: {names}")
        calls = {
            "type": "tags_with_separator",
            "tags": [_invoke(tool) for tool in chosen],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": self.is_single,
        }
        texts = [{"type": "const_string", "value": value} for value in (CALLS_BEGIN, CALLS_END)]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [texts[0], calls, texts[1]]}}
        grammar = read_structured_outputs({"structural_tag": tag})
        assert grammar is not None
        return grammar


def split_demand(body: Mapping[str, Any], protocol: Protocol) -> tuple[dict[str, Any], Demand | None]:
    """The body with "auto" where it demands a call, and the demand."""
    choice = body.get("tool_choice")
    auto = {"type": "auto"} if protocol == "messages" else "auto"
    if protocol == "messages":
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        is_named, is_demand = kind == "tool", kind in ("any", "tool")
        name = choice.get("name") if is_named and isinstance(choice, Mapping) else None
        is_single = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
    else:
        is_named = isinstance(choice, Mapping) and choice.get("type") == "function"
        is_demand = is_named or choice == "required"
        name = _function_name(choice, protocol) if is_named and isinstance(choice, Mapping) else None
        is_single = is_named or body.get("parallel_tool_calls") is False
    if not is_demand:
        return dict(body), None
    if is_named and not isinstance(name, str):
        raise RequestError(f"tool_choice is {shown(choice)}; it must name a tool")
    return {**body, "tool_choice": auto}, Demand(name, is_single)


def _function_name(choice: Mapping[str, Any], protocol: Protocol) -> object:
    function = choice.get("function") if protocol == "chat" else choice
    return function.get("name") if isinstance(function, Mapping) else None


def _invoke(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("parameters") or ANY_ARGUMENTS
    content = {"type": "json_schema", "json_schema": schema, "style": PARAMETER_STYLE}
    return {"type": "tag", "begin": INVOKE_BEGIN % tool["name"], "content": content, "end": INVOKE_END}
