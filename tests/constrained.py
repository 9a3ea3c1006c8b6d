"""Constrained requests of every kind, and what says whether their answers are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 3},
        "score": {"type": "number", "minimum": 0, "maximum": 10},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EVENT = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "where": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{2,8}( [A-Z][a-z]+)?$"}]},
        "open": {"type": "boolean"},
    },
    "required": ["day", "where", "open"],
}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "minItems": 2, "items": False}
REGEXES = (
    r"[0-9]{3}-[a-z]{2,6}",
    r"(yes|no), [A-Z][a-z]{1,5}\.",
    r"-?[0-9]{1,4}(\.[0-9]{1,2})?",
    r"[^\s]{1,12}",
    r".{5,20}",
)
CHOICES = ("yes", "no", "perhaps so", "Ж")
SUM = 'root ::= term (" + " term){0,3}\nterm ::= [1-9] [0-9]? | "(" root ")"'
CALL = 'root ::= name "(" (arg (", " arg){0,2})? ")"\nname ::= [a-z]{1,8}\narg ::= name | [0-9]{1,3}'

Form = dict[str, Any]


def _valid_json(schema: Any) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    return lambda text: validator.is_valid(json.loads(text))


def _matches(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text, re.ASCII) is not None


def _is_sum(text: str) -> bool:
    return set(text) <= set("0123456789+() ") and isinstance(eval(text), int)  # noqa: S307


# What a request asks for, and whether an answer is valid.
KINDS: list[tuple[Form, Callable[[str], bool]]] = [
    *(({"json": schema}, _valid_json(schema)) for schema in (PERSON, EVENT, PAIR)),
    *(({"regex": regex}, _matches(regex)) for regex in REGEXES),
    ({"grammar": SUM}, _is_sum),
    ({"grammar": CALL}, _matches(r"[a-z]{1,8}\((([a-z]{1,8}|\d{1,3})(, ([a-z]{1,8}|\d{1,3})){0,2})?\)")),
    ({"choice": list(CHOICES)}, lambda text: text in CHOICES),
]
