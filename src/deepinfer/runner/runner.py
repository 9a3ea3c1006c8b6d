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
from deepinfer.ops.batch import ForwardBatch, Hidden
from deepinfer.ops.check import OpChecker
from deepinfer.ops.clock import OpClock
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.images import ImageEncoder
from deepinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from deepinfer.sampling.sampler import Sampler
from deepinfer.structured.rows import ConstrainedRows

PROMPT_PART = 256  # prompt tokens whose logits are on the device at a time


class Model(Protocol):
    """A model bound to its caches, of whatever version."""

    def forward(self, inputs: ForwardBatch) -> Hidden:
        """What `logits` reads, for the logit tokens in their order; writes the step's cache entries."""
        ...

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits [tokens, vocab] float32."""
        ...


@dataclass(frozen=True)
class Forwarded:
    """A step between its two halves: logits are on the device, tokens are not drawn yet.

    hidden: first of the sampling rows, then of the prompt tokens that are scored.
    """

    plan: StepPlan
    hidden: Hidden
    logits: Tensor  # [sampling rows, vocab]
    started: float


class Runner:
    """Model, caches and sampler of one engine.

    `forward` and `sample` are two calls because the token masks of constrained rows are filled in
    between, by another process. constraints: None = no request has a grammar. encoder: keeps the
    embeddings of images; None = no request has any.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        sampler: Sampler,
        constraints: ConstrainedRows | None = None,
        clock: OpClock | None = None,
        checker: OpChecker | None = None,
        encoder: ImageEncoder | None = None,
    ):
        self.model, self.builder, self.sampler, self.encoder = model, builder, sampler, encoder
        self.constraints, self.clock, self.checker = constraints, clock, checker

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocks until its tokens are on the host."""
        return self.sample(self.forward(plan))

    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the step's logits and cache entries."""
        started = time.monotonic()
        for setup in plan.setups:
            self.sampler.set_slot(setup)
        if self.constraints is not None:
            self.constraints.set_slots(plan.setups)
            self.constraints.begin(plan)
        batch = self.builder.build(plan)
        if plan.images:
            assert self.encoder is not None, "a plan has images, but the model takes none"
            batch = self.encoder.place(plan, batch)
        hidden = self.model.forward(batch)
        num_sampling = int(np.count_nonzero(plan.samples))
        return Forwarded(plan, hidden, self.model.logits(hidden.part(0, num_sampling)), started)

    def sample(self, forwarded: Forwarded) -> StepResult:
        """Draw the next tokens, leave them in the token rings for the next step, return them."""
        plan, logits = forwarded.plan, forwarded.logits
        slots, positions = plan.slots, plan.starts + plan.counts  # of the tokens to draw
        if not plan.samples.all():
            slots, positions = slots[plan.samples], positions[plan.samples]
        masks = None if self.constraints is None else self.constraints.masks()
        drawn = self.sampler.sample(logits, slots, positions, masks)
        self.sampler.observe(slots, drawn.token_ids)
        self.builder.store(drawn.token_ids, slots, positions)
        token_ids, is_finite = _on_host(drawn.token_ids).astype(np.int32), _on_host(drawn.is_finite)
        errors = {} if masks is None else masks.errors
        if self.constraints is not None:
            self.constraints.take(token_ids)
            is_finite[list(errors)] = False
        prompt_logits, start = self._prompt_logits(plan, forwarded.hidden, len(slots))
        return StepResult(
            step=plan.step,
            token_ids=token_ids,
            is_finite=is_finite,
            has_choice=None if drawn.has_choice is None else _on_host(drawn.has_choice),
            logprobs=None if drawn.logprobs is None else _logprobs([drawn.logprobs]),
            prompt_logits=prompt_logits,
            prompt_logprobs=self._prompt_logprobs(plan, forwarded.hidden, start),
            seconds=time.monotonic() - forwarded.started,
            op_seconds=self.clock.take() if self.clock is not None else {},
            op_checks=self.checker.checks() if self.checker is not None else {},
            errors=errors,
        )

    def _prompt_logits(self, plan: StepPlan, hidden: Hidden, start: int) -> tuple[dict[int, Float32], int]:
        """Whole logits by row, of the tokens from `start` on, and the first token behind them."""
        found = {}
        for row in np.flatnonzero(plan.wants_logits).tolist():
            end = start + int(plan.counts[row])
            parts = [self.model.logits(hidden.part(first, last)) for first, last in _parts(start, end)]
            found[row], start = np.concatenate([_on_host(part) for part in parts]), end
        return found, start

    def _prompt_logprobs(self, plan: StepPlan, hidden: Hidden, start: int) -> Logprobs | None:
        """Lines of all scored prompt tokens; their whole logits stay on the device, a part at a time."""
        if not len(plan.logprob_targets):
            return None
        slots, targets = np.repeat(plan.slots[plan.logprob_rows], plan.logprob_counts), plan.logprob_targets
        token_ids = torch.from_numpy(targets.astype(np.int64)).to(self.builder.device)
        num_top = self.sampler.num_prompt_logprobs(slots)
        return _logprobs(
            [
                token_logprobs(
                    self.model.logits(hidden.part(start + first, start + end)), token_ids[first:end], num_top
                )
                for first, end in _parts(0, len(targets))
            ]
        )


def _parts(start: int, end: int) -> list[tuple[int, int]]:
    """start .. end - 1 in stretches of PROMPT_PART."""
    return [(first, min(first + PROMPT_PART, end)) for first in range(start, end, PROMPT_PART)]


def _logprobs(parts: list[TokenLogprobs]) -> Logprobs:
    values, ranks, top_ids, top_values = (_on_host(torch.cat(column)) for column in zip(*parts, strict=True))
    return Logprobs(values, ranks, top_ids, top_values)


def _on_host(values: Tensor) -> NDArray[Any]:
    return values.numpy() if values.is_cpu else values.cpu().numpy()  # even a `cpu` without work costs time
