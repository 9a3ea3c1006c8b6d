"""SamplingParams: everything a caller can ask of the choice of tokens, declared once.

A field carries its own range and help text; the command line and a server read them from the
class (`declared()`), so a new parameter is one field here and one stage in `stages.py`.
This module does not load torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import RequestError, shown
from deepinfer.structured.grammar import Constraint, Grammar, read_so_args, read_structured_outputs

MAX_COUNT = 2**31 - 1  # counts are int32 on their way to the device
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64


def parameter(default: Any, help_text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field with its default, help text and inclusive range."""
    return field(default=default, metadata={"help": help_text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Raises RequestError for a value of the wrong type or out of range, naming it.
    """

    max_tokens: int | None = parameter(None, "most tokens to generate; None = what fits", low=1)
    temperature: float = parameter(1.0, "0 = greedy", low=0.0, high=100.0)
    top_k: int = parameter(0, "keep the k most likely tokens; 0 or -1 = all", low=-1, high=MAX_COUNT)
    top_p: float = parameter(1.0, "keep the likeliest tokens up to this total probability", low=0.0, high=1.0)
    min_p: float = parameter(0.0, "drop tokens below this share of the likeliest one", low=0.0, high=1.0)
    seed: int | None = parameter(
        None, "same seed, prompt and parameters: same text; None = random", low=0, high=MAX_SEED
    )
    stop: tuple[str, ...] = parameter((), "texts that end the answer; they are cut off")
    stop_token_ids: tuple[int, ...] = parameter((), "tokens that end the answer")
    ignore_eos: bool = parameter(False, "go on after the end-of-sequence token")
    logprobs: int | None = parameter(
        None, "log-probabilities of the chosen and this many best tokens", low=0, high=MAX_LOGPROBS
    )

    structured_outputs: Grammar | None = parameter(
        None, "what the answer must match: one of json, json_object, regex, grammar, choice, structural_tag"
    )
    so_args: Constraint | None = parameter(
        None, "the same from a trigger on: schema_type, schema, trigger_token_ids, bound_token_id"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "structured_outputs", read_structured_outputs(self.structured_outputs))
        object.__setattr__(self, "so_args", read_so_args(self.so_args))
        if self.constraint is not None:
            _check_constraint(self)
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens)
        for name in ("top_k",):
            _integer(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {shown(self.ignore_eos)}; it must be true or false")
        for spec in dataclasses.fields(self):
            _check_range(spec, getattr(self, spec.name))
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 (use temperature=0 for the likeliest token)")

    @property
    def constraint(self) -> Constraint | None:
        """The grammar that the answer follows, and where it begins."""
        return self.so_args if self.structured_outputs is None else Constraint(self.structured_outputs)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From API or JSON names; `seq_seed` is another name of `seed`. Unknown names are errors."""
        values = dict(values)
        if "seq_seed" in values:
            if values.get("seed") is not None:
                raise RequestError("seed and seq_seed are two names of one parameter; give one of them")
            values["seed"] = values.pop("seq_seed")
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {shown(name)}; known are {', '.join(known)}")
        return cls(**values)


def declared() -> tuple[dataclasses.Field[Any], ...]:
    """The declared parameters in order, with `help`, `low` and `high` in their metadata."""
    return dataclasses.fields(SamplingParams)


def _check_constraint(params: SamplingParams) -> None:
    if params.structured_outputs is not None and params.so_args is not None:
        raise RequestError("structured_outputs and so_args are two ways to give a grammar; give one of them")
    if params.ignore_eos is not False:
        raise RequestError("ignore_eos is set, but an answer under a grammar ends where the grammar does; leave it out")


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}; it must be a whole number")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {shown(value)}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} is {shown(value)}; it must be finite")
    return number


def _check_range(spec: dataclasses.Field[Any], value: Any) -> None:
    low, high = spec.metadata["low"], spec.metadata["high"]
    if value is None or (low is None and high is None):
        return
    if (low is not None and value < low) or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{spec.name} is {shown(value)}; it must be {rule}")


def _strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else _items("stop", value)
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop holds {shown(text)}; each must be a text of 1 to {MAX_STOP_CHARACTERS} characters"
            )
    if len(texts) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(texts)} texts; at most {MAX_STOP_STRINGS} are taken")
    return tuple(dict.fromkeys(texts))


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = _items("stop_token_ids", value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"stop_token_ids holds {shown(token)}; each must be a token id of 0 or more")
    if len(ids) > MAX_STOP_TOKENS:
        raise RequestError(f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKENS} are taken")
    return tuple(dict.fromkeys(ids))


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}; it must be a list")
    return tuple(value)
