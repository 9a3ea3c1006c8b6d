"""What the host does in a captured decode step of one rank, and how much of it the device waits for.

    PYTHONPATH=src python benchmarks/rank_host.py [--model tests/config-flash.json] [--requests 256,64,8] [--steps 20]

Steps are those of `deepinfer bench rank`, one after the other without waiting between them, as an engine with work
runs them; in turns as they are, and with drafts that the host queues when it has seen the tokens. By part: milliseconds
of host time, the median of the steps; parts lie within those above them. Queued: from the wake with a step's tokens
until the next step is queued, of that `forward`, and how long the device still drafts then. Waiting: the device's time
without a kernel, from torch.profiler, in gaps of 20 us and more (what the host leaves) and in shorter ones (what
kernels leave between them); and the longest gaps, each with the kernels around it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from deepinfer.messages import StepPlan
from deepinfer.ops.transfer import Arrival
from deepinfer.rank import measure
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.draft_graphs import DraftGraphs
from deepinfer.runner.graph_cache import RIPE, CudaRecorder
from deepinfer.runner.graph_shapes import StepShape
from deepinfer.runner.graphs import StepGraphs
from deepinfer.runner.runner import Runner
from deepinfer.runner.speculation import Speculation
from deepinfer.sampling.sampler import Sampler

PARTS: tuple[tuple[type, str], ...] = (
    (Runner, "forward"), (Speculation, "resolve"), (Speculation, "feeds_draft"), (Runner, "compute"),
    (StepGraphs, "takes"), (StepGraphs, "run"), (StepShape, "pack"),
    (Runner, "sample"), (Speculation, "_receive"), (Sampler, "sample"), (Speculation, "follow"),
    (Sampler, "plain_draws"), (DraftGraphs, "follow"), (BatchBuilder, "verify"), (Speculation, "verify"),
    (Speculation, "report"), (Arrival, "wait"),
)  # fmt: skip
LONG_GAP = 20  # microseconds
TURNS = 4


class Parts:
    """Seconds of each part in each step, taken around the methods while it is on."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for owner, name in PARTS:
            setattr(owner, name, self._timed(f"{owner.__name__}.{name}", getattr(owner, name)))
        record = CudaRecorder.record
        label = lambda recorder, call: self._timed(f"replay of {call.__name__}", record(recorder, call))  # noqa: E731
        setattr(CudaRecorder, "record", label)  # noqa: B010

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **named)
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed


def start(rank: measure.Rank, num_requests: int) -> StepPlan:
    """A plan as `Rank.decode` makes it, its slots set and its graphs recorded."""
    slots = np.arange(1, num_requests + 1, dtype=np.int32)
    starts = rank.context - measure.SPACE - slots % 128
    plan = measure._plan(slots, starts, np.full_like(slots, 1 + rank.num_drafts), is_prefill=False)
    plan.setups = [measure._setup(int(slot), rank.context) for slot in slots]
    rank._runner.execute(plan)
    plan.setups = []
    rank._drafting.progress.starts[slots] = starts
    for _ in range(RIPE + 2):
        rank._runner.execute(plan)
    return plan


def by_the_host(speculation: Speculation, *_: Any) -> bool:
    """`Speculation.follow` that leaves all to `propose`."""
    speculation._is_wanted = True
    return False


def turns(rank: measure.Rank, plan: StepPlan, num_steps: int) -> dict[str, float]:
    """Milliseconds of a step by who queues its drafts, the median of both in turns."""
    follow, found = Speculation.follow, defaultdict(list)
    for name, call in TURNS * (("device", follow), ("host", by_the_host)):
        setattr(Speculation, "follow", call)  # noqa: B010
        rank._runner.execute(plan)
        for _ in range(num_steps):
            begin = time.perf_counter()
            rank._runner.execute(plan)
            found[name].append(1e3 * (time.perf_counter() - begin))
    setattr(Speculation, "follow", follow)  # noqa: B010
    return {name: statistics.median(times) for name, times in found.items()}


def queueing(rank: measure.Rank, plan: StepPlan, num_steps: int) -> list[float]:
    """Milliseconds from the wake with tokens until the next step is queued, of `forward`, and of drafting left then."""
    wait, runner, woken, times = Arrival.wait, rank._runner, [0.0], []

    def noted(arrival: Arrival) -> Any:
        found = wait(arrival)
        woken.append(time.perf_counter())
        return found

    setattr(Arrival, "wait", noted)  # noqa: B010
    runner.execute(plan)
    for _ in range(num_steps):
        since, begin = woken[-1], time.perf_counter()
        forwarded = runner.forward(plan)
        queued = time.perf_counter()
        woken.clear()
        runner.sample(forwarded)  # waits for the drafts, then for the tokens
        times.append((queued - since, queued - begin, woken[0] - queued))
    setattr(Arrival, "wait", wait)  # noqa: B010
    return [1e3 * statistics.median(column) for column in zip(*times, strict=True)]


def gaps(events: list[tuple[float, float, str]]) -> list[tuple[float, str, str]]:
    """Microseconds without a kernel, the kernel before and the one after; events: (begin, end, name)."""
    found, (_, busy_until, last) = [], events[0]
    for begin, end, name in events[1:]:
        if begin > busy_until:
            found.append((begin - busy_until, last, name))
        if end > busy_until:
            busy_until, last = end, name
    return found


def show_waiting(rank: measure.Rank, plan: StepPlan, num_steps: int) -> None:
    """The device's idle time over some steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            rank._runner.execute(plan)
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    if not events:
        print("  the profiler saw no kernels")
        return
    idle, span = gaps(events), (max(end for _, end, _ in events) - events[0][0]) / num_steps / 1e3
    long = sum(gap for gap, _, _ in idle if gap >= LONG_GAP) / num_steps / 1e3
    short = sum(gap for gap, _, _ in idle if gap < LONG_GAP) / num_steps / 1e3
    print(
        f"  device: {span:.2f} ms a step, {len(events) // num_steps} kernels and copies; waits {long:.3f} ms in gaps of"
    )
    print(f"  {LONG_GAP} us and more, {short:.3f} ms in shorter ones; the longest:")
    for gap, before, after in sorted(idle, reverse=True)[: 4 * num_steps]:
        print(f"  {gap:>8.0f} us   {before[:44]:<44} -> {after[:44]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("tests/config-flash.json"))
    parser.add_argument("--requests", default="256,64,8")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    requests = [int(count) for count in given.requests.split(",")]
    rank = measure.Rank(
        given.model, num_ranks=64, num_requests=max(requests), context=131072, num_drafts=3, acceptance=0.75
    )
    parts = Parts()
    for num_requests in requests:
        plan = start(rank, num_requests)
        parts.seconds.clear()
        for _ in range(given.steps):
            rank._runner.execute(plan)
        print(f"\n{num_requests} requests; host, ms:")
        for name, seconds in parts.seconds.items():
            print(f"  {name:<28} {1e3 * statistics.median(seconds):>8.3f}")
        since, forward, left = queueing(rank, plan, given.steps)
        print(f"  queued {since:.3f} after the wake, of that forward {forward:.3f}; drafts come {left:.3f} later")
        found = turns(rank, plan, given.steps)
        print(f"  a step: {found['device']:.2f} ms, {found['host']:.2f} with drafts that the host queues")
    for num_requests in requests:  # at the end: once the profiler ran, launches take longer
        print(f"\n{num_requests} requests:")
        show_waiting(rank, start(rank, num_requests), 3)


if __name__ == "__main__":
    main()
