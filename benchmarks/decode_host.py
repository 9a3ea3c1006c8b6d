"""Host time of a decode step on a CPU, with nothing in the place of the model: plan, execute, take the result.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/decode_host.py [--requests 1,8,32] [--steps 1500]

Scheduler, runner and sampler of an engine of the small model, in one thread and one after the other; the native call
that computes the step returns at once. All requests are greedy. Microseconds, medians. In an engine it takes about
twice as long, since weights have gone through the caches in between.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
import time

import numpy as np

from deepinfer.backends.cpu.library import native
from deepinfer.cache.manager import CacheManager
from deepinfer.checkpoint import hub
from deepinfer.config.engine import EngineConfig
from deepinfer.messages import GenerateRequest, StepPlan
from deepinfer.runner.build import BuiltRunner, build_runner
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.scheduler import Scheduler

WARM, PROMPT = 50, np.arange(10, 138, dtype=np.int32)


def make_scheduler(config: EngineConfig, built: BuiltRunner, num_requests: int, num_steps: int) -> Scheduler:
    """A scheduler with so many requests, which go on for more than so many steps."""
    options = dataclasses.replace(
        config.scheduler, max_step_tokens=built.max_step_tokens, max_prefill_tokens=built.max_prefill_tokens
    )
    cache = CacheManager(built.num_blocks, options.max_num_requests, built.block_tokens, built.max_model_len)
    scheduler = Scheduler(
        options, cache, eos_token_ids=built.eos_ids, max_model_len=built.max_model_len, vocab_size=built.vocab_size
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 8 * num_requests, ignore_eos=True, seed=1)
    for number in range(num_requests):
        scheduler.add(GenerateRequest(f"request-{number}", PROMPT, params, arrival=time.monotonic()))
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None, "nothing to plan"
    return plan


def measure(config: EngineConfig, built: BuiltRunner, num_requests: int, num_steps: int) -> list[float]:
    """Medians of plan, execute and result."""
    scheduler, times = make_scheduler(config, built, num_requests, num_steps + WARM), []
    while not (plan := planned(scheduler)).is_plain:
        scheduler.update(built.runner.execute(plan))
    scheduler.update(built.runner.execute(plan))
    library, run_model = native(), native().run_model

    def nothing(*addresses: int | None) -> int:
        *_, token_ids, is_finite = addresses
        assert token_ids is not None and is_finite is not None
        ctypes.memset(token_ids, 0, 8 * num_requests)
        ctypes.memset(is_finite, 1, num_requests)
        return 0

    setattr(library, "run_model", nothing)  # noqa: B010
    for _ in range(num_steps + WARM):
        start = time.perf_counter()
        plan = planned(scheduler)
        middle = time.perf_counter()
        result = built.runner.execute(plan)
        executed = time.perf_counter()
        scheduler.update(result)
        times.append((middle - start, executed - middle, time.perf_counter() - executed))
    setattr(library, "run_model", run_model)  # noqa: B010
    return [1e6 * statistics.median(column) for column in zip(*times[WARM:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    config = EngineConfig.from_options({"device": "cpu", "num_threads": 1, "num_draft_tokens": 0})
    built = build_runner(config, hub.resolve(config.model.model, config.model.revision))
    print(f"{'requests':>8} {'plan':>9} {'execute':>9} {'result':>9}")
    for count in map(int, given.requests.split(",")):
        cells = " ".join(f"{part:>9.1f}" for part in measure(config, built, count, given.steps))
        print(f"{count:>8} {cells}", flush=True)


if __name__ == "__main__":
    main()
