"""Decode steps as CUDA graphs: one launch for all kernels of a forward pass and its logits.

A step of few tokens has some thousand short kernels, and launching them takes longer than they run. Steps with
prompt tokens are never captured, see `graph_cache.py` for which others are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import StepPlan
from deepinfer.ops.batch import Computed, TokenBatch
from deepinfer.ops.transfer import Staged
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.graph_cache import GraphCache
from deepinfer.runner.graph_shapes import ALIGNMENT, StepShape, packed_rows, padded, padded_batch
from deepinfer.runner.model import Model

MAX_TOKENS = 2048  # of a step that is captured; launches are the lesser part of larger ones


def logits_memory(num_slots: int, num_drafts: int, vocab_size: int, device: torch.device) -> Tensor:
    """[most tokens of a step that is captured, vocab] float32, for logits of steps and of drafts."""
    return torch.zeros(padded(min(num_slots * (1 + num_drafts), MAX_TOKENS)), vocab_size, device=device)


@dataclass(frozen=True)
class Step:
    """A captured step, and what it gives of all tokens that it has room for."""

    replay: Callable[[], None]
    computed: Computed


class StepGraphs:
    """The captured decode steps of one engine.

    logits: [most tokens, vocab] float32, the memory for those of a step.
    """

    def __init__(self, model: Model, builder: BatchBuilder, graphs: GraphCache, logits: Tensor) -> None:
        self._model, self._builder, self._graphs = model, builder, graphs
        self._logits, self._max_tokens = logits, len(logits)
        self._staged = Staged(12 * (len(logits) + ALIGNMENT), builder.device)
        self._token_ids = torch.zeros(len(logits), dtype=torch.int64, device=builder.device)
        self._is_finite = torch.zeros(len(logits), dtype=torch.bool, device=builder.device)

    def takes(self, plan: StepPlan) -> bool:
        """Whether it is a step of decode rows alone, all past the first window of their decoder half."""
        return bool(
            not plan.has_prefill
            and 0 < plan.num_tokens <= self._max_tokens
            and not (plan.decoder_starts.any() and self._has_young_window(plan))
        )

    def _has_young_window(self, plan: StepPlan) -> bool:
        begin = plan.decoder_starts
        return bool(((begin > 0) & (plan.starts - begin < self._builder.window - 1)).any())

    def run(self, plan: StepPlan, *, feeds_draft: bool) -> Computed | None:
        """The step of a plan that it takes, block-table changes first; what it gives is valid until the next step.

        None: nothing was done, the step is to be run without a graph.
        """
        builder = self._builder
        shape = StepShape.of(plan, builder.block_tokens, builder.max_columns, feeds_draft=feeds_draft)
        step = self._graphs.find(shape, lambda: self._record(shape))
        if step is None:
            return None
        if not shape.has_room(plan):
            builder.apply_changes(plan)
        shape.pack(plan, self._staged.host)
        step.replay()
        num_tokens = plan.num_tokens
        return step.computed if num_tokens == shape.num_tokens else self._computed(num_tokens, step.computed.rows)

    def _computed(self, num_tokens: int, rows: TokenBatch | None) -> Computed:
        best = self._token_ids[:num_tokens], self._is_finite[:num_tokens]
        return Computed(None, self._logits[:num_tokens], best, rows)

    def _record(self, shape: StepShape) -> Step:
        shape.pack(_nothing(), self._staged.host)

        def step() -> None:
            self._staged.send(shape.size)
            batch = padded_batch(shape, self._staged.numbers, self._builder)
            batch = dataclasses.replace(batch, logits=self._logits[: shape.num_tokens])
            token_ids, is_finite = self._model.compute(batch, shape.num_tokens).best
            self._token_ids[: shape.num_tokens].copy_(token_ids)
            self._is_finite[: shape.num_tokens].copy_(is_finite)

        replay = self._graphs.recorder.record(step)
        rows = packed_rows(shape, self._staged.numbers, self._builder)
        return Step(replay, self._computed(shape.num_tokens, rows))


def _nothing() -> StepPlan:
    """A plan without rows."""
    number, truth = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
    return StepPlan(0, number, number, number, number, truth, truth, truth, number, number, number, number)
