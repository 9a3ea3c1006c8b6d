"""The device side of one engine: carries out plans in the order they come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import Bool, Float32, Int32, Logprobs, StepPlan, StepResult
from deepinfer.ops.batch import Computed, Hidden
from deepinfer.ops.check import OpChecker
from deepinfer.ops.clock import OpClock
from deepinfer.ops.transfer import Arrival
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.graphs import StepGraphs
from deepinfer.runner.images import ImageEncoder
from deepinfer.runner.lines import Lines
from deepinfer.runner.model import Model
from deepinfer.runner.speculation import Speculation
from deepinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from deepinfer.sampling.sampler import Sampled, Sampler
from deepinfer.structured.rows import ConstrainedRows

NO_HIDDEN = "a step that scores prompt tokens is not captured"
PROMPT_PART = 256  # prompt tokens whose logits are on the device at a time


@dataclass(frozen=True)
class Forwarded:
    """A step between its two halves: logits are on the device, tokens are not drawn yet.

    plan: as it runs, each row where it really begins. taken: when it was; started: when the drafts had arrived that it
    had to wait for. Both in seconds on `time.monotonic()`.
    """

    plan: StepPlan
    lines: Lines
    computed: Computed
    taken: float
    started: float


class Runner:
    """Model, caches and sampler of one engine.

    `forward` and `sample` are two calls because the token masks of constrained rows are filled in
    between, by another process. constraints: None = no request has a grammar. encoder: keeps the
    embeddings of images; None = no request has any. speculation: None = no drafts. graphs: replays decode steps
    that it captured; None = their kernels are launched one by one.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        sampler: Sampler,
        constraints: ConstrainedRows | None = None,
        speculation: Speculation | None = None,
        clock: OpClock | None = None,
        checker: OpChecker | None = None,
        encoder: ImageEncoder | None = None,
        graphs: StepGraphs | None = None,
    ):
        self.model, self.builder, self.sampler, self.encoder = model, builder, sampler, encoder
        self.constraints, self.speculation = constraints, speculation
        self.clock, self.checker, self.graphs = clock, checker, graphs

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocks until its tokens are on the host."""
        return self.sample(self.forward(plan))

    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the step's logits and cache entries."""
        taken = time.monotonic()
        if self.speculation is not None:
            self.speculation.wait()
        started, drafting, feeds_draft = time.monotonic(), None if plan.is_plain else self.speculation, False
        for setup in plan.setups:
            self.sampler.set_slot(setup)
        if self.constraints is not None:
            self.constraints.set_slots(plan.setups)
        if drafting is not None:
            drafting.set_slots(plan.setups)
            plan = drafting.resolve(plan, self.constraints)
            feeds_draft = drafting.feeds_draft(plan, self.builder.window)
        lines = Lines.of(plan)
        if self.constraints is not None:
            drafts = None
            if drafting is not None and self.constraints.has_any(lines.slots):
                drafts = drafting.drafts(lines)
            self.constraints.begin(lines.slots, lines.counts, drafts)
        return Forwarded(plan, lines, self.compute(plan, lines, feeds_draft=feeds_draft), taken, started)

    def compute(self, plan: StepPlan, lines: Lines, *, feeds_draft: bool) -> Computed:
        """The forward pass of a plan as it runs, and the logits of its lines."""
        if self.graphs is not None and self.graphs.takes(plan):
            computed = self.graphs.run(plan, feeds_draft=feeds_draft)
            if computed is not None:
                return computed
        batch = self.builder.build(plan, feeds_draft=feeds_draft)
        if plan.images:
            assert self.encoder is not None, "a plan has images, but the model takes none"
            batch = self.encoder.place(plan, batch)
        return self.model.compute(batch, lines.num_lines)

    def sample(self, forwarded: Forwarded) -> StepResult:
        """Draw the next tokens, leave the newest in the token rings for the next step, return them."""
        plan, lines = forwarded.plan, forwarded.lines
        drafting = None if plan.is_plain else self.speculation
        hidden, logits, best, rows = forwarded.computed
        masks = None if self.constraints is None else self.constraints.masks()
        before, proposed = (None, None) if drafting is None else (drafting.before(lines), drafting.proposed(lines))
        drawn = self.sampler.sample(logits, lines.line_slots, lines.line_positions, masks, before, proposed, best)
        arrival = _departed(drawn)
        is_followed = drafting is not None and drafting.follow(lines, drawn, rows, self.constraints)
        token_ids, is_finite, has_choice, logprobs = _arrived(drawn, arrival)
        errors = {} if masks is None else masks.errors
        if errors:
            is_finite[list(errors)] = False
        num_tokens = None  # that each row keeps; None = its one
        if drafting is not None:
            num_tokens = drafting.verify(lines, token_ids, is_finite if has_choice is None else is_finite & has_choice)
        self._observe(lines, drawn.token_ids, num_tokens)
        if self.constraints is not None and masks is not None:
            self.constraints.take(token_ids, lines.offsets, lines.counts if num_tokens is None else num_tokens)
        if drafting is not None and num_tokens is not None and not plan.has_prefill:
            drafting.observe_step(plan.num_tokens, time.monotonic() - forwarded.started)
        if not is_followed:
            if drafting is not None and num_tokens is not None:
                newest = token_ids[lines.offsets + np.maximum(num_tokens, 1) - 1]
                drafting.propose(lines, newest, self.constraints)
            self._store(lines, drawn.token_ids, num_tokens)  # while the drafts are made
        prompt_logits, start = ({}, 0) if plan.is_plain else self._prompt_logits(plan, hidden, lines.num_lines)
        result = StepResult(
            step=plan.step,
            token_ids=token_ids,
            is_finite=is_finite,
            has_choice=has_choice,
            logprobs=logprobs,
            prompt_logits=prompt_logits,
            prompt_logprobs=self._prompt_logprobs(plan, hidden, start),
            num_computed=plan.num_tokens,
            op_seconds=self.clock.take() if self.clock is not None else {},
            op_checks=self.checker.checks() if self.checker is not None else {},
            errors=errors,
        )
        if num_tokens is not None:
            _keep_lines(result, lines, num_tokens)
        elif self.speculation is not None:
            self.speculation.rest(plan.num_rows, time.monotonic() - forwarded.started)
        if self.speculation is not None:
            self.speculation.report(result)
        result.seconds = time.monotonic() - forwarded.taken
        return result

    def _observe(self, lines: Lines, token_ids: Tensor, num_tokens: Int32 | None) -> None:
        """The stages count what each row keeps of the tokens drawn [lines]."""
        if not self.sampler.remembers(lines.slots):
            return
        if num_tokens is None or (lines.is_single and num_tokens.all()):
            return self.sampler.observe(lines.slots, token_ids)
        for place in range(int(num_tokens.max(initial=0))):
            rows = np.flatnonzero(num_tokens > place)
            self.sampler.observe(lines.slots[rows], self._chosen(token_ids, lines.offsets[rows] + place))

    def _store(self, lines: Lines, token_ids: Tensor, num_tokens: Int32 | None) -> None:
        """The newest token that each row keeps goes into the token ring."""
        if num_tokens is None or (lines.is_single and num_tokens.all()):
            return self.builder.store(token_ids, lines.slots, lines.firsts)
        rows = np.flatnonzero(num_tokens)
        last = num_tokens[rows] - 1
        newest = self._chosen(token_ids, lines.offsets[rows] + last)
        return self.builder.store(newest, lines.slots[rows], lines.firsts[rows] + last)

    def _chosen(self, values: Tensor, lines: Int32) -> Tensor:
        return values[self.builder.int64(lines)]

    def _prompt_logits(self, plan: StepPlan, hidden: Hidden | None, start: int) -> tuple[dict[int, Float32], int]:
        """Whole logits by row, of the tokens from `start` on, and the first token behind them."""
        found = {}
        for row in np.flatnonzero(plan.wants_logits).tolist():
            assert hidden is not None, NO_HIDDEN
            end = start + int(plan.counts[row])
            parts = [self.model.logits(hidden.part(first, last)) for first, last in _parts(start, end)]
            found[row], start = np.concatenate([_on_host(part) for part in parts]), end
        return found, start

    def _prompt_logprobs(self, plan: StepPlan, hidden: Hidden | None, start: int) -> Logprobs | None:
        """Lines of all scored prompt tokens; their whole logits stay on the device, a part at a time."""
        if not len(plan.logprob_targets):
            return None
        assert hidden is not None, NO_HIDDEN
        slots, targets = np.repeat(plan.slots[plan.logprob_rows], plan.logprob_counts), plan.logprob_targets
        token_ids = self.builder.int64(targets)
        num_top = self.sampler.num_prompt_logprobs(slots)
        return _logprobs(
            [
                token_logprobs(
                    self.model.logits(hidden.part(start + first, start + end)), token_ids[first:end], num_top
                )
                for first, end in _parts(0, len(targets))
            ]
        )


def _keep_lines(result: StepResult, lines: Lines, num_tokens: Int32) -> None:
    """Drop the lines behind those that each row keeps."""
    result.num_tokens, result.num_checked = num_tokens, lines.counts - 1
    if lines.is_single and num_tokens.all():
        return
    kept = lines.kept(num_tokens)
    if kept.all():
        return
    result.token_ids, result.is_finite = result.token_ids[kept], result.is_finite[kept]
    result.has_choice = None if result.has_choice is None else result.has_choice[kept]
    result.logprobs = None if result.logprobs is None else result.logprobs.lines(kept)
    places = np.cumsum(kept) - 1
    result.errors = {int(places[line]): error for line, error in result.errors.items() if kept[line]}


def _departed(drawn: Sampled) -> Arrival:
    """What was drawn, on its way to the host; the drafts behind it are not waited for."""
    choice = () if drawn.has_choice is None else (drawn.has_choice,)
    return Arrival(drawn.token_ids, drawn.is_finite, *choice, *(drawn.logprobs or ()))


def _arrived(drawn: Sampled, arrival: Arrival) -> tuple[Int32, Bool, Bool | None, Logprobs | None]:
    """The same on the host, once it is there."""
    token_ids, is_finite, *others = arrival.wait()
    has_choice = None if drawn.has_choice is None else others.pop(0)
    logprobs = None if drawn.logprobs is None else Logprobs(*others)
    return token_ids.astype(np.int32), is_finite, has_choice, logprobs


def _parts(start: int, end: int) -> list[tuple[int, int]]:
    """start .. end - 1 in stretches of PROMPT_PART."""
    return [(first, min(first + PROMPT_PART, end)) for first in range(start, end, PROMPT_PART)]


def _logprobs(parts: list[TokenLogprobs]) -> Logprobs:
    values, ranks, top_ids, top_values = (_on_host(torch.cat(column)) for column in zip(*parts, strict=True))
    return Logprobs(values, ranks, top_ids, top_values)


def _on_host(values: Tensor) -> NDArray[Any]:
    return values.numpy() if values.is_cpu else values.cpu().numpy()  # even a `cpu` without work costs time
