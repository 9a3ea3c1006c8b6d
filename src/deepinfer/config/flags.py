"""Command-line flags made from declared fields, and a parser that never guesses."""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from deepinfer.config import fields
from deepinfer.config.fields import Option
from deepinfer.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, takes no abbreviations and names the nearest flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                raise self._unknown_flag(word.partition("=")[0])
        return namespace, unknown

    def _unknown_flag(self, flag: str) -> ConfigError:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        return ConfigError(f"unknown flag {flag}; {hint}")


def add_flags(parser: argparse.ArgumentParser, title: str, options: Iterable[Option]) -> None:
    """One flag for each option; a flag that is not given leaves no trace in the parsed namespace."""
    group = parser.add_argument_group(title.rstrip("."))
    for option in options:
        group.add_argument(
            option.flag, dest=option.name, default=argparse.SUPPRESS, help=_help(option), **_form(option)
        )


def given(namespace: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """The values of those options that were given as flags."""
    values = vars(namespace)
    found = {option.name: values[option.name] for option in options if option.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _form(option: Option) -> dict[str, Any]:
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if option.is_list and option.kind is str:
        return {"action": "append", "metavar": "TEXT"}
    word = option.name.rpartition("_")[2].upper()
    if issubclass(option.kind, tuple):
        word = ":".join(typing.get_type_hints(option.kind)).upper()
    return {
        "type": _converter(option),
        "metavar": "|".join(option.choices) or (f"{word},..." if option.is_list else word),
    }


def _converter(option: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return fields.parse(option, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.is_list and option.kind is str:
        text += "; may be given several times"
    return text if option.default in (None, ()) else f"{text} (default: {_shown(option.default)})"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
