"""Which calls of tools an answer may hold: read from the body of each protocol, and enforced by a grammar.

The prompt format knows no demand of a call while the model thinks. So the prompt is made as for "auto", in every
mode, and the grammar leaves the answer (after its thinking) no other way than a block of calls. Where calls are
only offered, the grammar begins with such a block, if a tool is strict or only one call may be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.tokenizer import TOOL_MARKUP as MARK
from deepinfer.structured.grammar import Grammar, read_structured_outputs

Protocol: TypeAlias = Literal["chat", "responses", "messages"]
Form: TypeAlias = Mapping[str, Any]  # of an answer, as `structured_outputs` has it
Tool: TypeAlias = Mapping[str, Any]

CALLS, CALLS_BEGIN, CALLS_END = f"<{MARK} calls>", f"<{MARK} calls>\n", f"</{MARK} calls>"
BEFORE_CALLS = "\n\n"
INVOKE_BEGIN, INVOKE_END = f'<{MARK} invoke name="%s">\n', f"</{MARK} invoke>\n"
PARAMETER_STYLE = "deepseek_v4_1_xml"  # xgrammar's name for V4.1's parameters of a call
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a body says of the calls in its answer.

    is_demanded: there must be a call. name: of this tool; None = of any. is_single: one call, not several.
    strict: tools whose calls must fit their parameters, beside those that say so themselves.
    """

    is_demanded: bool = False
    name: str | None = None
    is_single: bool = False
    strict: frozenset[str] = frozenset()

    def grammar(self, tools: Sequence[Tool], form: Form | None) -> Grammar | None:
        """What the answer must look like; None = as it likes. form: of an answer that is no call.

        Raises RequestError when a demanded tool is not there, or what is asked cannot be enforced.
        """
        if self.is_demanded:
            return _tag(_sequence(_text(BEFORE_CALLS), self._block(self._chosen(tools), fits=True)))
        if not tools:
            return read_structured_outputs(form)
        if form is not None:
            calls = _sequence(_text(BEFORE_CALLS), self._block(tools))
            return _tag({"type": "or", "elements": [_element(form), calls]})
        if not self.is_single and not any(map(self._is_strict, tools)):
            return None
        return _tag({
            "type": "triggered_tags", "triggers": [CALLS], "tags": [self._block(tools)], "stop_after_first": True,
        })  # fmt: skip

    def _chosen(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        chosen = [tool for tool in tools if self.name is None or tool["name"] == self.name]
        if not chosen:
            names = ", ".join(tool["name"] for tool in tools) or "none"
            wanted = "a call" if self.name is None else shown(self.name)
            raise RequestError(f"tool_choice demands {wanted}, but the tools of the request are: {names}")
        return chosen

    def _block(self, tools: Sequence[Tool], *, fits: bool = False) -> dict[str, Any]:
        """All calls of an answer. fits: they fit the parameters also of tools that are not strict."""
        calls = {
            "type": "tags_with_separator",
            "tags": [_invoke(tool, fits=fits or self._is_strict(tool)) for tool in tools],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": self.is_single,
        }
        return {"type": "tag", "begin": CALLS_BEGIN, "content": calls, "end": CALLS_END}

    def _is_strict(self, tool: Tool) -> bool:
        return tool.get("strict") is True or tool["name"] in self.strict


def split_tool_choice(body: Mapping[str, Any], protocol: Protocol) -> tuple[dict[str, Any], ToolChoice]:
    """The body with "auto" where it demands a call, and what it says of calls."""
    choice = body.get("tool_choice")
    if protocol == "messages":
        auto: object = {"type": "auto"}
        stated = choice if isinstance(choice, Mapping) else {}
        is_named, is_demanded = stated.get("type") == "tool", stated.get("type") in ("any", "tool")
        name, is_single = stated.get("name"), stated.get("disable_parallel_tool_use") is True
        strict = _strict_names(body.get("tools"))  # conversion does not read it there
    else:
        auto = "auto"
        is_named = isinstance(choice, Mapping) and choice.get("type") == "function"
        is_demanded = is_named or choice == "required"
        name = _function_name(choice, protocol) if is_named and isinstance(choice, Mapping) else None
        is_single = is_named or body.get("parallel_tool_calls") is False
        strict = frozenset()
    if is_named and not isinstance(name, str):
        raise RequestError(f"tool_choice is {shown(choice)}; it must name a tool")
    plain = {**body, "tool_choice": auto} if is_demanded else dict(body)
    return plain, ToolChoice(is_demanded, name if is_named else None, is_single, strict)


def _function_name(choice: Mapping[str, Any], protocol: Protocol) -> object:
    function = choice.get("function") if protocol == "chat" else choice
    return function.get("name") if isinstance(function, Mapping) else None


def _strict_names(tools: object) -> frozenset[str]:
    listed = [tool for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return frozenset(str(tool.get("name")) for tool in listed if tool.get("strict") is True)


def _invoke(tool: Tool, *, fits: bool) -> dict[str, Any]:
    schema = tool.get("parameters") if fits else None
    content = {"type": "json_schema", "json_schema": schema or ANY_ARGUMENTS, "style": PARAMETER_STYLE}
    return {"type": "tag", "begin": INVOKE_BEGIN % tool["name"], "content": content, "end": INVOKE_END}


def _element(form: Form) -> dict[str, Any]:
    """A form as a part of a structural tag."""
    if "regex" in form:
        grammar = read_structured_outputs(form)
        assert grammar is not None
        return {"type": "regex", "pattern": grammar.text}
    return {"type": "json_schema", "json_schema": form.get("json", ANY_ARGUMENTS)}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def _tag(format: dict[str, Any]) -> Grammar:
    grammar = read_structured_outputs({"structural_tag": {"type": "structural_tag", "format": format}})
    assert grammar is not None
    return grammar
