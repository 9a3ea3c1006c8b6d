"""Typed values out of a config.json, every refusal naming the key, its value and the rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeGuard

from deepinfer.errors import ModelError

MAX_FILE_BYTES = 16 * 2**20  # a config.json has a few kilobytes
MAX_INTEGER = 2**31 - 1  # positions and ids are int32 on the device


def read_json(path: Path) -> object:
    """The content of a small JSON file. Raises ModelError when it cannot be read as JSON."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; a config.json has at most {MAX_FILE_BYTES}")
        return json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot read {path} ({reason}); a model folder needs a config.json") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is not a JSON file in UTF-8: {str(error)[:200] or 'nested too deeply'}") from error


def shown(value: object) -> str:
    """A value for an error message: short, whatever it is."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple) and (
        len(value) > 64 or any(isinstance(v, list | tuple | Mapping) for v in value)
    ):
        return f"a list of {len(value)} values"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(entry) for entry in value) + "]"
    text = json.dumps(value, ensure_ascii=True) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


class Section:
    """One object of a config.json; `path` is its place in the file, as in "text_config"."""

    def __init__(self, values: object, path: str = "") -> None:
        self._path = path
        if not isinstance(values, Mapping):
            raise ModelError(f"{path or 'config.json'} is {shown(values)}; it must be an object")
        self._values = values

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise ModelError for the value of a key: "<key> is <value>; <rule>"."""
        value = shown(self._values[key]) if key in self._values else "missing"
        raise ModelError(f"{self._name(key)} is {value}; {rule}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def section(self, key: str) -> Section:
        """The object under a key."""
        if not isinstance(self._values.get(key), Mapping):
            self.refuse(key, "it must be an object")
        return Section(self._values[key], self._name(key))

    def integer(self, key: str, low: int = 1, high: int = MAX_INTEGER, *, default: int | None = None) -> int:
        """A whole number from low to high; `default` when the key is missing or null."""
        if default is not None and not self.has(key):
            return default
        value = self._values.get(key)
        if not _is_integer(value, low, high):
            self.refuse(key, f"it must be a whole number from {low} to {high}")
        return value

    def multiple(self, key: str, of: int, high: int) -> int:
        """A positive multiple of `of`: a width whose elements share scales in groups of that many."""
        value = self.integer(key, 1, high)
        if value % of:
            self.refuse(key, f"it must be a multiple of {of}, since each {of} elements share a scale")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers from low to high."""
        value = self._values.get(key)
        if not isinstance(value, list | tuple) or not all(_is_integer(entry, low, high) for entry in value):
            self.refuse(key, f"it must be a list of whole numbers from {low} to {high}")
        return tuple(value)

    def ascending(self, key: str, high: int) -> tuple[int, ...]:
        """A list of layer numbers from 0 to high, ascending; empty when the key is missing or null."""
        value = self.integers(key, 0, high) if self.has(key) else ()
        if any(left >= right for left, right in zip(value, value[1:], strict=False)):
            self.refuse(key, "its layer numbers must be ascending, none twice")
        return value

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A finite number from low to high; `default` when the key is missing or null."""
        if default is not None and not self.has(key):
            return default
        value = self._values.get(key)
        if not _is_number(value, low, high):
            self.refuse(key, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false; `default` when the key is missing or null."""
        value = self._values.get(key) if self.has(key) else default
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], *, default: str | None = None) -> str:
        """One of the allowed texts; `default` when the key is missing or null."""
        if default is not None and not self.has(key):
            return default
        value = self._values.get(key)
        if not isinstance(value, str) or value not in allowed:
            self.refuse(key, f"this engine runs {' or '.join(allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, at least one."""
        value = self._values.get(key)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(entry, str) for entry in value):
            self.refuse(key, "it must be a list of texts")
        return tuple(value)

    def is_list(self, key: str) -> bool:
        """Whether the key holds a list."""
        return isinstance(self._values.get(key), list | tuple)

    def _name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key


def _is_integer(value: object, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN is not
