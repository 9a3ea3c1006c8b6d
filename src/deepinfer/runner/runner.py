"""The device side of one engine: carries out plans in the order they come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import Float32, Logprobs, StepPlan, StepResult
from deepinfer.ops.batch import ForwardBatch
from deepinfer.ops.clock import OpClock
from deepinfer.runner.batch import BatchBuilder
from deepinfer.sampling.sampler import Sampler


class Model(Protocol):
    """A model bound to its caches, of whatever version."""

    def forward(self, inputs: ForwardBatch) -> Tensor:
        """Logits [len(inputs.logit_tokens), vocab] float32; writes the step's cache entries."""
        ...


@dataclass(frozen=True)
class Forwarded:
    """A step between its two halves: logits are on the device, tokens are not drawn yet."""

    plan: StepPlan
    logits: Tensor
    started: float


class Runner:
    """Model, caches and sampler of one engine.

    `forward` and `sample` are two calls so that a host can fill token masks in between.
    """

    def __init__(self, model: Model, builder: BatchBuilder, sampler: Sampler, clock: OpClock | None = None):
        self.model, self.builder, self.sampler, self.clock = model, builder, sampler, clock

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocks until its tokens are on the host."""
        return self.sample(self.forward(plan))

    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the step's logits and cache entries."""
        started = time.monotonic()
        for setup in plan.setups:
            self.sampler.set_slot(setup.slot, setup.params)
        return Forwarded(plan, self.model.forward(self.builder.build(plan)), started)

    def sample(self, forwarded: Forwarded) -> StepResult:
        """Draw the next tokens, leave them in the token rings for the next step, return them."""
        plan, logits = forwarded.plan, forwarded.logits
        slots, positions = plan.slots, plan.starts + plan.counts  # of the tokens to draw
        if not plan.samples.all():
            slots, positions = slots[plan.samples], positions[plan.samples]
        drawn = self.sampler.sample(logits[: len(slots)], slots, positions)
        self.builder.store(drawn.token_ids, slots, positions)
        logprobs = None
        if drawn.logprobs is not None:
            values, ranks, top_ids, top_values = map(_on_host, drawn.logprobs)
            logprobs = Logprobs(values, ranks.astype(np.int32), top_ids.astype(np.int32), top_values)
        return StepResult(
            step=plan.step,
            token_ids=_on_host(drawn.token_ids).astype(np.int32),
            is_finite=_on_host(drawn.is_finite),
            logprobs=logprobs,
            prompt_logits=_prompt_logits(plan, logits[len(slots) :]) if plan.wants_logits.any() else {},
            seconds=time.monotonic() - forwarded.started,
            op_seconds=self.clock.take() if self.clock is not None else {},
        )


def _on_host(values: Tensor) -> NDArray[Any]:
    return values.numpy() if values.is_cpu else values.cpu().numpy()  # even a `cpu` without work costs time


def _prompt_logits(plan: StepPlan, logits: Tensor) -> dict[int, Float32]:
    rows = np.flatnonzero(plan.wants_logits).tolist()
    counts = plan.counts[rows].tolist()
    parts = torch.split(logits, counts) if rows else ()
    return {row: _on_host(part) for row, part in zip(rows, parts, strict=True)}
