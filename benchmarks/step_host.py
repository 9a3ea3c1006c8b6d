"""Host time of a captured decode step without a device: what the device thread does around the kernels.

    PYTHONPATH=src python benchmarks/step_host.py [--requests 8,64,256] [--steps 300] [--policy all] [--cold]

Runner, graphs, drafting and sampler are the real ones; a recorded graph does nothing, and tensors lie on the host. So
only Python, numpy and the calls into torch count. Each such call would be a copy or a kernel on a device and cost the
host some 5 us more, so their number is told too. Every request drafts 3 tokens and checks them all.

forward: from the plan until its graph is launched; it is hidden behind the drafts of the step before where all are
checked. between: from the arrival of the tokens until the drafts' graph is launched, which a device waits for; nothing
where the drafts follow the step without the host. rest: what is done while the step or the drafts are computed.
Milliseconds, medians. --cold: each wait reads so much other memory that the caches hold nothing else behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.messages import SlotSetup, StepPlan
from deepinfer.ops.batch import Computed, ForwardBatch, Hidden, TokenBatch
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import build
from deepinfer.ops.transfer import Arrival
from deepinfer.ops.values import DrawKeys
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.draft_graphs import DraftGraphs
from deepinfer.runner.graph_cache import GraphCache
from deepinfer.runner.graphs import StepGraphs, logits_memory
from deepinfer.runner.runner import Runner
from deepinfer.runner.speculation import Speculation
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculate.costs import StepCosts
from deepinfer.speculate.policy import CheckAll, CheckWorthwhile, DraftPolicy

VOCAB, DRAFTS, BLOCK, CONTEXT, START = 64, 3, 128, 131072, 100_000
WARM = 20
HOST = torch.device("cpu")


class Clock:
    """Seconds without those that the caches were filled in."""

    def __init__(self, other_bytes: int) -> None:
        self._other, self._filling = np.zeros(other_bytes, dtype=np.uint8), 0.0

    def now(self) -> float:
        return time.perf_counter() - self._filling

    def fill_caches(self) -> None:
        begin = time.perf_counter()
        self._other.sum()
        self._filling += time.perf_counter() - begin


class Nothing:
    """A recorder of graphs that do nothing but note when."""

    num_bytes = 0
    replayed = 0.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return self.replay

    def replay(self) -> None:
        self.replayed = self._clock.now()

    def reset(self) -> None:
        pass


class NoModel:
    """Logits and drafts of the right shapes."""

    def compute(self, inputs: ForwardBatch, num_lines: int) -> Computed:
        nothing = torch.zeros(num_lines, dtype=torch.int64)
        return Computed(None, torch.zeros(num_lines, VOCAB), (nothing, nothing == 0))

    def logits(self, hidden: Hidden) -> Tensor:
        return torch.zeros(len(hidden.pre), VOCAB)

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch.num_tokens, 1), torch.zeros(batch.num_tokens, VOCAB)

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        return logits, torch.zeros(len(logits))

    def draft(self, tokens: Tensor, batch: TokenBatch, keys: DrawKeys | None) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(tokens), DRAFTS, dtype=torch.int64), torch.full((len(tokens), 2, DRAFTS), -0.01)


def verify(token_ids: Tensor, is_usable: Tensor, batch: TokenBatch, ring: Tensor, newest: Tensor) -> None:
    """What a kernel would do."""


class Calls(TorchDispatchMode):
    """Counts calls into torch but for views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if not any(view in name for view in ("slice", "view", "select.", "expand", "alias", "detach", "transpose")):
            self.count += 1
        return func(*args, **(kwargs or {}))


class FixedCosts(StepCosts):
    """Times at which drafting pays."""

    def observe(self, num_tokens: int, seconds: float, rate: float = 0.0) -> None:
        pass


def make_runner(num_slots: int, policy: DraftPolicy, temperature: float, recorder: Nothing) -> Runner:
    """A runner whose slots 1 .. num_slots all decode."""
    ops, model = build({"reference": reference_ops("exact"), "nothing": {"verify": verify}}), NoModel()
    builder = BatchBuilder(ops, num_slots, CONTEXT // BLOCK, BLOCK, torch.zeros(num_slots + 1, 256).int(), 128)
    sampler = Sampler(ops, num_slots + 1, VOCAB, (1,), HOST)
    graphs, logits = GraphCache(recorder, 1), logits_memory(num_slots, DRAFTS, VOCAB, HOST)
    runner = Runner(model, builder, sampler, graphs=StepGraphs(model, builder, graphs, logits))
    drafts = DraftGraphs(model, builder, DRAFTS, graphs, logits)
    runner.speculation = Speculation(drafts, builder, sampler, policy, num_slots, (1,))
    runner.execute(plan_of(num_slots, temperature))
    return runner


def plan_of(num_rows: int, temperature: float | None = None) -> StepPlan:
    """All rows with all their drafts; with a temperature, what sets the slots too."""
    slots, nothing, yes = (
        np.arange(1, num_rows + 1, dtype=np.int32), np.zeros(0, dtype=np.int32), np.ones(num_rows, dtype=np.bool_)
    )  # fmt: skip
    plan = StepPlan(
        0, slots, START - slots, np.full_like(slots, 1 + DRAFTS), np.zeros_like(slots), ~yes, yes, ~yes, nothing,
        nothing, nothing, nothing,
    )  # fmt: skip
    if temperature is not None:
        params = SamplingParams(temperature=temperature, max_tokens=CONTEXT, seed=1)
        plan.setups = [SlotSetup(int(slot), params, 8, np.zeros(8, dtype=np.int32)) for slot in slots]
    return plan


def measure(num_rows: int, num_steps: int, policy: DraftPolicy, temperature: float, clock: Clock) -> list[float]:
    """Medians of forward, between and rest in ms, and the calls of forward and of the others."""
    recorder, arrived = Nothing(clock), [0.0]
    wait = Arrival.wait

    def noted(arrival: Arrival) -> list[Any]:
        found = wait(arrival)
        clock.fill_caches()
        arrived[0] = clock.now()
        return found

    setattr(Arrival, "wait", noted)  # noqa: B010
    runner = make_runner(num_rows, policy, temperature, recorder)
    plan, times = plan_of(num_rows), []
    for step in range(WARM + num_steps):
        start = clock.now()
        forwarded = runner.forward(plan)
        queued = clock.now()
        runner.sample(forwarded)
        end = clock.now()
        between = max(0.0, recorder.replayed - arrived[0])
        if step >= WARM:
            times.append((queued - start, between, end - queued - between))
    with Calls() as first:  # type: ignore[no-untyped-call]
        forwarded = runner.forward(plan)
    with Calls() as second:  # type: ignore[no-untyped-call]
        runner.sample(forwarded)
    setattr(Arrival, "wait", wait)  # noqa: B010
    return [*(1e3 * statistics.median(column) for column in zip(*times, strict=True)), first.count, second.count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="8,64,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", choices=("all", "worthwhile"), default="all")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    clock = Clock(64 << 20 if given.cold else 0)
    print(f"{'requests':>8} {'forward':>9} {'between':>9} {'rest':>9}   calls of forward, others")
    for num_rows in map(int, given.requests.split(",")):
        costs = FixedCosts([1, 2048], [1.0, 1.001]), FixedCosts([1, 2048], [1e-6, 2e-6])
        policy = CheckAll() if given.policy == "all" else CheckWorthwhile(DRAFTS, *costs)
        *parts, first, second = measure(num_rows, given.steps, policy, given.temperature, clock)
        cells = " ".join(f"{part:>9.3f}" for part in parts)
        print(f"{num_rows:>8} {cells}   {first:.0f}, {second:.0f}", flush=True)


if __name__ == "__main__":
    main()
