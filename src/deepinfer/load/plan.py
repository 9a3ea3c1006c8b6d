"""What a load test asks: prompts, answer lengths and times, all decided before the first request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import ConfigError, shown

FIRST_TOKEN = 16  # ids below are control tokens in most vocabularies
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Ask:
    """One request. prompt: a text or token ids. at: seconds after the start; None = as soon as there is room."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from low to high, each as likely as the others. Written as 128 or 64-256."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ConfigError."""
        low, dash, high = text.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ConfigError(f"a length is {text!r}; it must be a number or a range, as in 128 or 64-256")
        made = cls(int(low), int(high or low))
        if not 1 <= made.low <= made.high:
            raise ConfigError(f"a length is {text!r}; it must begin at 1 or more and not end before it begins")
        return made

    def draw(self, random: np.random.Generator) -> int:
        return int(random.integers(self.low, self.high + 1))


def random_asks(count: int, inputs: Lengths, outputs: Lengths, *, largest_token: int, seed: int) -> list[Ask]:
    """Prompts of random token ids, FIRST_TOKEN to largest_token."""
    random = np.random.default_rng(seed)
    return [
        Ask(tuple(random.integers(FIRST_TOKEN, largest_token + 1, inputs.draw(random)).tolist()), outputs.draw(random))
        for _ in range(count)
    ]


def trace_asks(path: str, *, largest_token: int, seed: int) -> list[Ask]:
    """From a JSONL file; each line has `prompt`, `prompt_token_ids` or `input_length` (random ids), the length of the
    answer as `max_tokens` or `output_length`, and perhaps `timestamp` in milliseconds.

    Raises ConfigError naming the line that cannot be used.
    """
    random = np.random.default_rng(seed)
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    asks = []
    for number, line in enumerate(lines[:MAX_REQUESTS], 1):
        try:
            asks.append(_trace_ask(json.loads(line), random, largest_token))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number} is {shown(line)}; it cannot be used ({error!r})") from None
    if not asks:
        raise ConfigError(f"{path} holds no requests")
    return asks


def _trace_ask(record: dict[str, Any], random: np.random.Generator, largest_token: int) -> Ask:
    prompt = record.get("prompt", record.get("prompt_token_ids"))
    if prompt is None:
        prompt = random.integers(FIRST_TOKEN, largest_token + 1, int(record["input_length"])).tolist()
    time = record.get("timestamp")
    return Ask(
        prompt if isinstance(prompt, str) else tuple(map(int, prompt)),
        int(record.get("max_tokens") or record["output_length"]),
        None if time is None else float(time) / 1000,
    )


def with_arrivals(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """The requests at the times of a Poisson process. rate: requests per second."""
    gaps = np.random.default_rng(seed + 1).exponential(1 / rate, len(asks))
    return [Ask(ask.prompt, ask.max_tokens, at) for ask, at in zip(asks, np.cumsum(gaps).tolist(), strict=True)]
