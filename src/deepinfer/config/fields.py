"""The declared fields of a settings dataclass, with their types resolved, and text turned into values.

Flags, variables and the options page are all made from this one view.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.errors import ConfigError

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Option:
    """One declared field.

    kind: type of the value, or of one item when `is_list`; None is never part of it. A dataclass is
        given as JSON text, so its kind is str.
    choices: the allowed words of a Literal field; empty otherwise.
    variable: DeepInfer's own name for it, where there is one.
    rule: the range in words, where low and high do not say it.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    is_list: bool = False
    variable: str | None = None
    low: float | None = None
    high: float | None = None
    rule: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def read_options(settings: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in order."""
    hints = typing.get_type_hints(settings)
    return tuple(_option(spec, hints[spec.name]) for spec in dataclasses.fields(settings))


def read_groups(settings: type) -> dict[str, tuple[Option, ...]]:
    """The options of a dataclass composed of settings dataclasses, keyed by each part's docstring."""
    parts = [hint for hint in typing.get_type_hints(settings).values() if dataclasses.is_dataclass(hint)]
    return {str(part.__doc__): read_options(typing.cast(type, part)) for part in parts}


def parse(option: Option, text: str) -> Any:
    """The value that a text stands for, without range checks (the dataclass makes those).

    Lists are separated by commas, the parts of one item by colons. Raises ConfigError naming the rule, not the option.
    """
    if not option.is_list:
        return _parse_one(option, text)
    return tuple(_parse_one(option, item.strip()) for item in text.split(","))


def _parse_one(option: Option, text: str) -> Any:
    if option.choices:
        if text not in option.choices:
            raise ConfigError(f"{text!r} is not one of {', '.join(option.choices)}")
        return text
    if option.kind is bool:
        return parse_switch(text)
    if not issubclass(option.kind, tuple):
        return _parse_as(option.kind, text)
    kinds, parts = typing.get_type_hints(option.kind), text.split(":")
    if len(parts) != len(kinds):
        raise ConfigError(f"{text!r} is not {':'.join(kinds)}")
    return option.kind(*map(_parse_as, kinds.values(), parts))


def _parse_as(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        rule = {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{text!r} is not {rule}") from None


def parse_switch(text: str) -> bool:
    """1, true, yes, on or 0, false, no, off, in any case."""
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ConfigError(f"{text!r} is not one of {', '.join(TRUE + FALSE)}")
    return word in TRUE


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    return {option.name: option for option in options}


def _option(spec: dataclasses.Field[Any], hint: Any) -> Option:
    kind = _without_none(hint)
    is_list = typing.get_origin(kind) is tuple
    if is_list:
        kind = typing.get_args(kind)[0]
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return Option(
        name=spec.name,
        kind=str if choices or dataclasses.is_dataclass(kind) else kind,
        default=spec.default,
        help=spec.metadata["help"],
        choices=choices,
        is_list=is_list,
        variable=spec.metadata.get("variable"),
        low=spec.metadata.get("low"),
        high=spec.metadata.get("high"),
        rule=spec.metadata.get("rule", ""),
    )


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    assert len(kinds) == 1, f"a settings field has one type or that type and None, not {hint}"
    return kinds[0]
