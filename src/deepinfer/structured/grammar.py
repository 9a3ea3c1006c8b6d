"""What an answer must look like: a grammar as a request states it, and from where on it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepinfer.errors import RequestError, shown
from deepinfer.structured.json_schema import checked_schema, with_counted_groups

GrammarKind: TypeAlias = Literal["json_schema", "regex", "ebnf", "structural_tag"]

MAX_GRAMMAR_CHARACTERS = 2**18
MAX_CHOICES = 10_000
MAX_SPACES = 16  # spaces and line breaks at one place of a JSON text: a line break and seven levels of indentation
MAX_TRIGGER_TOKENS = 64
DOT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.", re.DOTALL)  # or what may hold a dot that means itself


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in the form that is compiled; equal grammars are compiled once.

    text: a JSON schema, regular expression, EBNF grammar with the rule `root`, or structural tag (JSON).
    """

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar compiled for the engine's vocabulary. number: its name; data: what a matcher loads."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and where in the answer it begins.

    trigger: the grammar holds from the token after this sequence on; empty = from the start.
    bound_token_id: a token of the trigger; once it was generated, the rest of the trigger follows.
    must_begin: the answer cannot end before the grammar begins.
    """

    grammar: Grammar
    trigger: tuple[int, ...] = ()
    bound_token_id: int | None = None
    must_begin: bool = False


def read_structured_outputs(value: object) -> Grammar | None:
    """The grammar of `SamplingParams.structured_outputs`: a mapping, or its JSON text, with exactly one of `FORMS`.

    Raises RequestError for anything else, and for a grammar that can be seen to be unusable.
    """
    if value is None or isinstance(value, Grammar):
        return value
    value = _parsed(value)
    if not isinstance(value, Mapping):
        raise RequestError(
            f'structured_outputs is {shown(value)}; it must be a mapping as in {{"regex": "[0-9]+"}} '
            f"with one of {', '.join(FORMS)}"
        )
    given = {name: form for name, form in value.items() if form is not None and form is not False}
    for name in given:
        if name not in FORMS:
            raise RequestError(f"structured_outputs has {shown(name)}; known are {', '.join(FORMS)}")
    if len(given) != 1:
        names = ", ".join(given) or "none"
        raise RequestError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, but has {names}")
    ((name, form),) = given.items()
    return _bounded(name, FORMS[name](form))


def read_so_args(value: object) -> Constraint | None:
    """The constraint of DeepInfer's `so_args`; raises RequestError.

    value: {"schema_type": one of `SCHEMA_TYPES`, "schema": its text, "trigger_token_ids": ids or
        None, "bound_token_id": an id of the trigger or None}, or the JSON text of that.
    """
    if value is None or isinstance(value, Constraint):
        return value
    value = _parsed(value)
    names = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise RequestError(f"so_args is {shown(value)}; it must be a mapping with {', '.join(names)}")
    kind = value.get("schema_type")
    if not isinstance(kind, str) or kind not in SCHEMA_TYPES:
        raise RequestError(f"so_args: schema_type is {shown(kind)}; it must be one of {', '.join(SCHEMA_TYPES)}")
    form = SCHEMA_TYPES[kind]
    schema = True if form == "json_object" else value.get("schema")
    if schema is None:
        raise RequestError(f"so_args: schema is missing; schema_type {kind!r} needs it")
    ids = value.get("trigger_token_ids")
    trigger = tuple(_token(token) for token in _listed("so_args: trigger_token_ids", [] if ids is None else ids))
    bound = value.get("bound_token_id")
    if len(trigger) > MAX_TRIGGER_TOKENS:
        raise RequestError(f"so_args: trigger_token_ids has {len(trigger)} ids; at most {MAX_TRIGGER_TOKENS} are taken")
    if bound is not None and _token(bound) not in trigger:
        raise RequestError(f"so_args: bound_token_id is {bound}; it must be one of trigger_token_ids {list(trigger)}")
    return Constraint(_bounded(form, FORMS[form](schema)), trigger, bound)


def _parsed(value: object) -> object:
    """What a JSON text holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _schema(value: object) -> Grammar:
    return Grammar("json_schema", checked_schema(value))


def _json_object(value: object) -> Grammar:
    if value is not True:
        raise RequestError(f"json_object is {shown(value)}; it must be true")
    return Grammar("json_schema", '{"type": "object"}')


def _regex(value: object) -> Grammar:
    """A dot is no line break, as in Python and ECMAScript; the compiler would let it be one."""
    text = with_counted_groups(_text("regex", value))
    return Grammar("regex", DOT.sub(lambda part: r"[^\n\r]" if part[0] == "." else part[0], text))


def _ebnf(value: object) -> Grammar:
    return Grammar("ebnf", _text("grammar", value))


def _choice(value: object) -> Grammar:
    """Any of the texts, written as EBNF."""
    texts = [_text("choice", text) for text in _listed("choice", value)]
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise RequestError(f"choice has {len(texts)} texts; it must have 1 to {MAX_CHOICES}")
    return Grammar("ebnf", "root ::= " + " | ".join(map(_quoted, dict.fromkeys(texts))))


def _structural_tag(value: object) -> Grammar:
    """A structural tag (xgrammar's format) as a mapping or its text; the JSON schemas in it are checked too."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structural_tag is no JSON text ({error})") from None
    try:
        return Grammar("structural_tag", json.dumps(_with_checked_schemas(value), ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"structural_tag cannot be written as JSON ({error})") from None


def _with_checked_schemas(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_checked_schemas(item) for item in value]
    if not isinstance(value, dict):
        return value
    spaces = {"max_whitespace_cnt": MAX_SPACES} if value.get("type") == "json_schema" else {}
    return spaces | {
        name: json.loads(checked_schema(item)) if name == "json_schema" else _with_checked_schemas(item)
        for name, item in value.items()
    }


FORMS: dict[str, Callable[[object], Grammar]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
# Names of so_args' schema_type, and the form each one means.
SCHEMA_TYPES = {**{name: name for name in FORMS}, "json_schema": "json", "ebnf": "grammar"}


def _bounded(name: str, grammar: Grammar) -> Grammar:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{name} has {len(grammar.text)} characters; a grammar must have at most {MAX_GRAMMAR_CHARACTERS}"
        )
    if not grammar.text.isascii():
        try:
            grammar.text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} holds a lone surrogate and has no UTF-8 form; remove it") from None
    return grammar


def _quoted(text: str) -> str:
    """An EBNF literal; control characters as escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in escaped) + '"'


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {shown(value)}; it must be a text of 1 character or more")
    if "\0" in value:
        raise RequestError(f"{name} holds the character U+0000, which no grammar can have; remove it")
    return value


def _listed(name: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {shown(value)}; it must be a list")
    return list(value)


def _token(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise RequestError(
            f"so_args holds {shown(value)} among its token ids; each must be a whole number of 0 or more"
        )
    return value
