"""The figures of a load test: percentiles, rates, goodput; as a table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.errors import ConfigError
from deepinfer.load.client import Outcome

PERCENTILES = (50, 90, 95, 99)
LIMITS = ("ttft", "tpot", "e2e")  # what goodput can be asked of


@dataclass(frozen=True)
class Times:
    """In milliseconds. ttft, tpot, e2e: one per answered request; tpot is the mean time per token after the first.
    gaps: between pieces of text, of all these requests."""

    ttft: list[float]
    tpot: list[float]
    e2e: list[float]
    gaps: list[float]


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as milliseconds by name. Raises ConfigError."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in LIMITS or not value.replace(".", "", 1).isdigit():
            raise ConfigError(
                f"a goodput limit is {word!r}; it must be {' or '.join(LIMITS)} and milliseconds, as in ttft:500"
            )
        limits[name] = float(value)
    return limits


def report(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> dict[str, Any]:
    """Every figure, ready for JSON."""
    good = _answered(outcomes)
    begun = min((outcome.due for outcome in outcomes), default=0.0)
    seconds = max((outcome.done for outcome in outcomes), default=0.0) - begun or 1e-9
    times = times_of(outcomes)
    within = sum(all(1000 * values[name] <= limit for name, limit in limits.items()) for values in map(_one, good))
    errors = Counter((outcome.error or "no text")[:120] for outcome in outcomes if outcome not in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(errors.most_common(10)),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens_per_s": round(sum(outcome.num_prompt_tokens for outcome in good) / seconds, 1),
        "output_tokens_per_s": round(sum(outcome.num_tokens for outcome in good) / seconds, 1),
        "ttft_ms": _percentiles(times.ttft),
        "tpot_ms": _percentiles(times.tpot),
        "inter_token_ms": _percentiles(times.gaps),
        "e2e_ms": _percentiles(times.e2e),
        "goodput": {"limits_ms": dict(limits), "requests_per_s": round(within / seconds, 3), "requests": within},
    }


def _answered(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.error is None and outcome.arrivals]


def _one(outcome: Outcome) -> dict[str, float]:
    """The three times of a request in seconds."""
    first = outcome.arrivals[0]
    tpot = (outcome.arrivals[-1] - first) / max(outcome.num_tokens - 1, 1)
    return {"ttft": first - outcome.due, "tpot": tpot, "e2e": outcome.arrivals[-1] - outcome.due}


def times_of(outcomes: Sequence[Outcome]) -> Times:
    """The times of the requests that were answered."""
    good = _answered(outcomes)
    values = [_one(outcome) for outcome in good]
    gaps = [gap for outcome in good for gap in np.diff(outcome.arrivals).tolist()]
    ttft, tpot, e2e = ([1000 * one[name] for one in values] for name in LIMITS)
    return Times(ttft, tpot, e2e, [1000 * gap for gap in gaps])


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{percent}": round(value, 2) for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": round(float(np.mean(values)), 2), **named, "max": round(max(values), 2)}


def table(figures: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    rows = [("time in ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")]
    for name in ("ttft_ms", "tpot_ms", "inter_token_ms", "e2e_ms"):
        rows.append((name.removesuffix("_ms"), *(f"{value:.2f}" for value in figures[name].values())))
    lines = [
        f"{figures['completed']} of {figures['requests']} requests in {figures['seconds']:.1f} s: "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.0f} output tokens/s, "
        f"{figures['prompt_tokens_per_s']:.0f} prompt tokens/s",
        *("".join(f"{cell:>14}" for cell in row) for row in rows),
    ]
    if figures["goodput"]["limits_ms"]:
        lines.append(f"goodput: {figures['goodput']['requests_per_s']:.2f} requests/s within the limits")
    lines += [f"{count} failed: {error}" for error, count in figures["errors"].items()]
    return "\n".join(lines)
