"""Host time of a decode step on the null backend: schedule() and update(), in milliseconds.

    PYTHONPATH=src python benchmarks/scheduler/decode_step.py [--steps 400] [--json]

Targets: schedule + update of a 256-row decode step below 0.3 ms median, 512 rows below 1 ms.
The tokens are compared with the direct computation before anything is timed. The collector stays
on. Two plans are in flight, as in an engine that plans ahead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from deepinfer.backends.null.runner import NullModel, NullRunner
from deepinfer.cache.manager import CacheManager
from deepinfer.config.engine import SchedulerOptions
from deepinfer.messages import GenerateRequest, StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.scheduler import Scheduler

TARGET_MS = {256: 0.3, 512: 1.0}
BLOCK_TOKENS, PROMPT_TOKENS, VOCAB_SIZE = 128, 100, 129280
MODEL = NullModel(vocab_size=VOCAB_SIZE)


@dataclass(frozen=True)
class Timing:
    """Milliseconds: [median, 10th, 90th percentile]."""

    rows: int
    steps: int
    schedule_ms: list[float]
    update_ms: list[float]
    total_ms: list[float]
    target_ms: float | None


def time_decode(num_rows: int, num_steps: int, num_warmup: int = 50) -> Timing:
    """Time `num_steps` decode steps of `num_rows` requests that all grow at different moments."""
    max_tokens = num_warmup + num_steps + 200
    prompts = [np.arange(PROMPT_TOKENS + row % BLOCK_TOKENS, dtype=np.int32) for row in range(num_rows)]
    max_model_len = PROMPT_TOKENS + BLOCK_TOKENS + max_tokens
    num_blocks = num_rows * -(-max_model_len // BLOCK_TOKENS)
    cache = CacheManager(num_blocks, num_rows, BLOCK_TOKENS, max_model_len)
    options = SchedulerOptions(max_num_requests=num_rows, max_step_tokens=num_rows * 512)
    scheduler = Scheduler(options, cache, eos_token_ids=[1], max_model_len=max_model_len, vocab_size=VOCAB_SIZE)
    runner = NullRunner(
        MODEL, num_slots=num_rows, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, max_model_len=max_model_len
    )
    for row, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, seed=row, ignore_eos=True)
        scheduler.add(GenerateRequest(f"request-{row}", prompt, params, arrival=time.monotonic()))

    answers: dict[str, list[int]] = {f"request-{row}": [] for row in range(num_rows)}
    plans: deque[StepPlan] = deque([_planned(scheduler)])
    schedule_ms, update_ms = [], []
    for step in range(num_warmup + num_steps):
        start = time.perf_counter()
        plan = _planned(scheduler)
        planned = time.perf_counter()
        plans.append(plan)
        result = runner.execute(plans.popleft())
        executed = time.perf_counter()
        output = scheduler.update(result)
        end = time.perf_counter()
        for name, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            answers[name].append(token)
        if step >= num_warmup:
            assert plan.num_rows == num_rows, f"{plan.num_rows} rows in a step of {num_rows} requests"
            schedule_ms.append((planned - start) * 1e3)
            update_ms.append((end - executed) * 1e3)
    for row in range(0, num_rows, 37):
        answer = answers[f"request-{row}"]
        assert answer == MODEL.answer(prompts[row], row, len(answer)), f"request-{row} has wrong tokens"
    total_ms = [a + b for a, b in zip(schedule_ms, update_ms, strict=True)]
    return Timing(
        num_rows, num_steps, _spread(schedule_ms), _spread(update_ms), _spread(total_ms), TARGET_MS.get(num_rows)
    )


def _planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None, "nothing to plan"
    return plan


def _spread(values: list[float]) -> list[float]:
    deciles = statistics.quantiles(values, n=10)
    return [round(value, 4) for value in (statistics.median(values), deciles[0], deciles[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    arguments = parser.parse_args()
    timings = [time_decode(rows, arguments.steps) for rows in (8, 256, 512)]
    if arguments.json:
        for timing in timings:
            print(json.dumps(asdict(timing) | {"commit": _commit()}))
        return
    print(f"decode step on the null backend, CPU, commit {_commit()}; ms, median [10 %, 90 %]")
    print(f"{'rows':>5} {'schedule':>24} {'update':>24} {'both':>24}  target")
    for timing in timings:
        spreads = (timing.schedule_ms, timing.update_ms, timing.total_ms)
        cells = [f"{median:.3f} [{low:.3f}, {high:.3f}]" for median, low, high in spreads]
        verdict = "-"
        if timing.target_ms is not None:
            verdict = f"< {timing.target_ms} {'reached' if timing.total_ms[0] < timing.target_ms else 'MISSED'}"
        print(f"{timing.rows:>5} {cells[0]:>24} {cells[1]:>24} {cells[2]:>24}  {verdict}")


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
