"""What values a sampling parameter takes: each check returns the value in its stored form or raises RequestError.

This module does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from deepinfer.errors import RequestError, shown

Check = Callable[[str, Any], Any]  # (name of the parameter, given value) -> stored value


class TokenBias(NamedTuple):
    """What is added to the logit of one token."""

    token_id: int
    bias: float


def whole(name: str, value: object) -> int:
    """A whole number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}; it must be a whole number")
    return value


def number(name: str, value: object) -> float:
    """A finite number, whole or not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {shown(value)}; it must be a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RequestError(f"{name} is {shown(value)}; it must be finite")
    return result


def switch(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def word(*words: str) -> Check:
    """One of these words."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise RequestError(f"{name} is {shown(value)}; it must be {' or '.join(words)}")
        return value

    return check


def texts(max_count: int, max_characters: int) -> Check:
    """A list of different texts, or one text; none is empty."""

    def check(name: str, value: object) -> tuple[str, ...]:
        given = (value,) if isinstance(value, str) else _items(name, value)
        for text in given:
            if not isinstance(text, str) or not 0 < len(text) <= max_characters:
                raise RequestError(
                    f"{name} holds {shown(text)}; each must be a text of 1 to {max_characters} characters"
                )
        _check_count(name, given, max_count, "texts")
        return tuple(dict.fromkeys(given))

    return check


def token_ids(max_count: int, *, min_count: int = 0, unique: bool = True) -> Check:
    """A list of token ids. unique: it is a set, so repeated ids are dropped."""

    def check(name: str, value: object) -> tuple[int, ...]:
        given = _items(name, value)
        for token in given:
            _token_id(name, token)
        _check_count(name, given, max_count, "ids")
        if len(given) < min_count:
            raise RequestError(f"{name} is empty; give at least {min_count} id, or leave it out")
        return tuple(dict.fromkeys(given)) if unique else given

    return check


def biases(max_count: int, largest: float) -> Check:
    """{token id: bias}, or pairs of the two; ids may be texts, as JSON has no other keys."""

    def check(name: str, value: object) -> tuple[TokenBias, ...]:
        pairs = tuple(value.items()) if isinstance(value, Mapping) else _items(name, value)
        _check_count(name, pairs, max_count, "ids")
        result: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RequestError(f"{name} holds {shown(pair)}; each must be a token id with its bias")
            token = _token_id(name, int(pair[0]) if _is_digits(pair[0]) else pair[0])
            if token in result:
                raise RequestError(f"{name} holds token id {token} twice; give it one bias")
            result[token] = bias = number(f"{name}[{token}]", pair[1])
            if abs(bias) > largest:
                raise RequestError(
                    f"{name}[{token}] is {shown(pair[1])}; it must be between -{largest:g} and {largest:g}"
                )
        return tuple(TokenBias(token, bias) for token, bias in result.items())

    return check


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20


def _token_id(name: str, token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise RequestError(f"{name} holds {shown(token)}; each must be a token id of 0 or more")
    return token


def _check_count(name: str, items: tuple[Any, ...], max_count: int, what: str) -> None:
    if len(items) > max_count:
        raise RequestError(f"{name} has {len(items)} {what}; at most {max_count} are taken")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}; it must be a list")
    return tuple(value)
