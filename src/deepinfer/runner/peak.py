"""What an engine takes of a device beside weights and cache blocks: its largest steps, run before those are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from deepinfer.errors import ConfigError
from deepinfer.messages import SlotSetup, StepPlan
from deepinfer.ops.table import Ops
from deepinfer.runner.drafts import Drafts, padding_rows
from deepinfer.runner.lines import Lines
from deepinfer.runner.padding import padding_plan, spread
from deepinfer.runner.runner import Runner
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import PlainDraws

# What holds copies of all logits at once: penalties, a filter that has to sort, log-probabilities.
HEAVIEST = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, logprobs=1, max_tokens=1, seed=0)


def largest_steps(num_slots: int, num_drafts: int, step_tokens: int, max_model_len: int) -> list[StepPlan]:
    """A step full of prompt tokens and one of as many draws as can be, at the end of the longest requests."""
    prompts = np.minimum(spread(step_tokens, min(num_slots, step_tokens)), max_model_len).astype(np.int32)
    draws = np.minimum(prompts, 1 + num_drafts).astype(np.int32)
    return [
        padding_plan(max_model_len - prompts, prompts, is_prefill=True),
        padding_plan(max_model_len - draws, draws, is_prefill=False),
    ]


def run_steps(runner: Runner, drafts: Drafts | None, plans: list[StepPlan]) -> None:
    """Run them to their draws, and a pass of drafts for the rows of each."""
    runner.sampler.set_slot(SlotSetup(0, HEAVIEST, 1, np.zeros(1, dtype=np.int32)))
    for plan in plans:
        lines = Lines.of(plan)
        logits = runner.compute(plan, lines, feeds_draft=drafts is not None).logits
        runner.sampler.sample(logits, lines.line_slots, lines.line_positions)
        if drafts is not None:
            heat = np.ones(plan.num_rows, dtype=np.float32)
            rows = padding_rows(plan.num_rows, int(plan.starts.min()))
            drafts.draft(rows, PlainDraws(heat, np.zeros(plan.num_rows, dtype=np.int64)))


def bytes_beside_blocks(
    make: Callable[[], tuple[Runner, Drafts | None]], ops: Ops, plans: list[StepPlan], device: torch.device
) -> int:
    """Bytes that torch takes of a CUDA device for the runner that `make` gives, without cache blocks, and these steps.

    Raises ConfigError when they do not fit.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    try:
        with _unwatched(ops):
            run_steps(*make(), plans)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        most = max(plan.num_tokens for plan in plans)
        raise ConfigError(
            f"a step of {most} tokens (max_step_tokens) for {plans[0].num_rows} requests does not fit {device} beside "
            f"the weights; lower max_step_tokens or max_num_requests ({error})"
        ) from None
    taken = torch.cuda.memory_reserved(device) - before
    torch.cuda.empty_cache()
    return taken


@contextlib.contextmanager
def _unwatched(ops: Ops) -> Iterator[None]:
    """No clock and no checker of ops looks on."""
    watchers = [watcher for watcher in (ops.clock, ops.checker) if watcher is not None]
    for watcher in watchers:
        watcher.is_on = False
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.is_on = True
