"""The device side of one engine: carries out plans in the order they come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Float32, Logprobs, StepPlan, StepResult
from deepinfer.ops.batch import ForwardBatch
from deepinfer.runner.batch import BatchBuilder
from deepinfer.sampling.sampler import Sampler
from deepinfer.structured.rows import ConstrainedRows


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

    `forward` and `sample` are two calls because the token masks of constrained rows are filled in
    between, by another process. constraints: None = no request has a grammar.
    """

    def __init__(
        self, model: Model, builder: BatchBuilder, sampler: Sampler, constraints: ConstrainedRows | None = None
    ):
        self.model, self.builder, self.sampler, self.constraints = model, builder, sampler, constraints

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocks until its tokens are on the host."""
        return self.sample(self.forward(plan))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the step's logits and cache entries."""
        started = time.monotonic()
        for setup in plan.setups:
            self.sampler.set_slot(setup.slot, setup.params)
        if self.constraints is not None:
            self.constraints.set_slots(plan.setups)
            self.constraints.begin(plan)
        return Forwarded(plan, self.model.forward(self.builder.build(plan)), started)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded) -> StepResult:
        """Draw the next tokens, leave them in the token rings for the next step, return them."""
        plan, logits, ring = forwarded.plan, forwarded.logits, self.builder.token_ring
        slots, positions = plan.slots, plan.starts + plan.counts  # of the tokens to draw
        if not plan.samples.all():
            slots, positions = slots[plan.samples], positions[plan.samples]
        masks = None if self.constraints is None else self.constraints.masks()
        drawn = self.sampler.sample(logits[: len(slots)], slots, positions, masks)
        token_ids = drawn.token_ids.to(torch.int32)
        places = torch.from_numpy(slots).to(ring.device), torch.from_numpy(positions % ring.shape[1]).to(ring.device)
        ring.index_put_(places, token_ids)
        logprobs = None
        if drawn.logprobs is not None:
            values, ranks, top_ids, top_values = (part.cpu().numpy() for part in drawn.logprobs)
            logprobs = Logprobs(values, ranks.astype(np.int32), top_ids.astype(np.int32), top_values)
        host_ids, is_finite = token_ids.cpu().numpy(), drawn.is_finite.cpu().numpy()
        errors = {} if masks is None else masks.errors
        if self.constraints is not None:
            self.constraints.take(host_ids)
            is_finite[list(errors)] = False
        return StepResult(
            step=plan.step,
            token_ids=host_ids,
            is_finite=is_finite,
            logprobs=logprobs,
            prompt_logits=_prompt_logits(plan, logits[len(slots) :]) if plan.wants_logits.any() else {},
            seconds=time.monotonic() - forwarded.started,
            errors=errors,
        )


def _prompt_logits(plan: StepPlan, logits: Tensor) -> dict[int, Float32]:
    rows = np.flatnonzero(plan.wants_logits).tolist()
    counts = plan.counts[rows].tolist()
    parts = torch.split(logits, counts) if rows else ()
    return {row: part.cpu().numpy() for row, part in zip(rows, parts, strict=True)}
