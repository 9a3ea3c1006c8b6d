"""Measuring how long steps and drafting take, once for each model, device and version."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from deepinfer import env, log
from deepinfer.__about__ import __version__
from deepinfer.messages import Int32
from deepinfer.ops.transfer import Arrival
from deepinfer.runner.drafts import Drafts, padding_rows
from deepinfer.runner.graph_cache import RIPE
from deepinfer.runner.lines import Lines
from deepinfer.runner.padding import padding_plan, spread
from deepinfer.runner.runner import Runner
from deepinfer.sampling.sampler import PlainDraws
from deepinfer.speculate.costs import StepCosts

logger = log.get(__name__)
REPEATS = 3  # of what is timed; before them, the times that a shape takes to become a graph
POSITION = 256  # where the measured tokens stand: their windows are full, and they select among entries
LEAST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # times bend, and a far count says little of a near one


def step_costs(runner: Runner, drafts: Drafts, num_slots: int, key: str) -> tuple[StepCosts, StepCosts]:
    """Of steps by their tokens, and of drafting by its rows; from the file of `key`, or measured now.

    key: what decides the times: model, device, ops, threads.
    """
    num_drafts = drafts.num_places
    token_counts = _counts(num_slots * (1 + num_drafts))
    row_counts = _counts(num_slots)
    file = _file(f"{key} {__version__} {num_drafts} {token_counts} {row_counts}")
    times = _read(file, len(token_counts), len(row_counts))
    if times is None:
        started = time.monotonic()
        num_runs = REPEATS + (0 if runner.graphs is None else RIPE)
        times = (
            [_best(partial(_step, runner, num_slots, count), num_runs) for count in token_counts],
            [_best(partial(_draft, drafts, count), num_runs) for count in row_counts],
        )
        logger.info(
            "measured the times of steps of up to %d tokens in %.1f s", token_counts[-1], time.monotonic() - started
        )
        _write(file, times)
        if runner.clock is not None:
            runner.clock.take()
    return StepCosts(token_counts, times[0]), StepCosts(row_counts, times[1])


def _counts(most: int) -> list[int]:
    most = max(most, 2)
    return [count for count in LEAST_COUNTS if 2 * count <= most] + [most]


def _best(run: Callable[[], None], num_runs: int) -> float:
    """Seconds of the fastest of some runs: what holds one up is not the step."""
    seconds = []
    for _ in range(num_runs):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _step(runner: Runner, num_slots: int, num_tokens: int) -> None:
    """A decode step of the padding slot."""
    num_rows = min(num_tokens, num_slots)
    starts: Int32 = np.full(num_rows, POSITION, dtype=np.int32)
    plan = padding_plan(starts, spread(num_tokens, num_rows), is_prefill=False)
    lines = Lines.of(plan)
    computed = runner.compute(plan, lines, feeds_draft=True)
    slots, positions = lines.line_slots, lines.line_positions
    runner.sampler.sample(computed.logits, slots, positions, best=computed.best).token_ids.cpu()


def _draft(drafts: Drafts, num_rows: int) -> None:
    greedy = PlainDraws(np.zeros(num_rows, dtype=np.float32), np.zeros(num_rows, dtype=np.int64))
    Arrival(*drafts.draft(padding_rows(num_rows, POSITION), greedy)).wait()


def _file(key: str) -> Path:
    home = env.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "deepinfer" / "steps"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(file: Path, *sizes: int) -> tuple[list[float], list[float]] | None:
    """Times that were measured before; None when there are none, or none that can be used."""
    try:
        found = json.loads(file.read_text())
        lists = [[float(value) for value in found[name]] for name in ("steps", "drafting")]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_sound = all(0 < value < math.inf for values in lists for value in values)
    return (lists[0], lists[1]) if is_sound and [len(values) for values in lists] == list(sizes) else None


def _write(file: Path, times: tuple[Sequence[float], Sequence[float]]) -> None:
    """Keep them for the next start; a folder that cannot be written to costs that start a second."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"steps": list(times[0]), "drafting": list(times[1])}))
        part.replace(file)
    except OSError as error:
        logger.info("step times are not kept (%s)", error)
