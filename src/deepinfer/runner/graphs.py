"""Decode steps as CUDA graphs: one launch for all kernels of a forward pass and its logits.

A step of few tokens has some thousand short kernels, and launching them takes longer than they run. So steps of
one shape are captured when the first of them comes, and replayed from then on. All numbers of a step lie in one
buffer that a single copy fills; shapes are rounded up, and what is too many belongs to the padding slot, which no
op writes to. A result is valid until the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Int32, StepPlan
from deepinfer.ops.batch import ForwardBatch, Hidden, TokenBatch
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.model import Model

MAX_TOKENS = 2048  # of a step that is captured; launches are the lesser part of larger ones
MAX_GRAPHS = 128  # the first captured goes when there are more
LEAST_COLUMNS = 4  # of the block table
ALIGNMENT = 32  # numbers; kernels are compiled for the alignment of what they read
Result = TypeVar("Result")


def padded(count: int) -> int:
    """The least size that is captured and holds this many: 1, 2, 4, 8, 16, ... 64, 96, ... 256, 384, ..."""
    for most, step in ((64, 8), (256, 32)):
        if count <= most:
            return -(-count // step) * step if count > 4 else 1 << (count - 1).bit_length()
    return -(-count // 128) * 128


@dataclass(frozen=True)
class StepShape:
    """What decides the kernels of a decode step.

    num_columns: blocks of the longest row, a power of two or the whole table.
    """

    num_tokens: int
    num_rows: int
    num_columns: int
    feeds_draft: bool

    @classmethod
    def of(cls, plan: StepPlan, block_tokens: int, max_columns: int, *, feeds_draft: bool) -> StepShape:
        """The shape that a plan of decode rows is padded to; tokens that are too many are a row of their own."""
        num_tokens = padded(plan.num_tokens)
        num_rows = padded(plan.num_rows + (num_tokens > plan.num_tokens))
        needed = int((plan.starts + plan.counts).max() - 1) // block_tokens + 1
        columns = min(max(LEAST_COLUMNS, 1 << (needed - 1).bit_length()), max_columns)
        return cls(num_tokens, num_rows, columns, feeds_draft)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of positions, rows, row_offsets, row_starts and row_slots in the buffer."""
        return self.num_tokens, self.num_tokens, self.num_rows + 1, self.num_rows, self.num_rows

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each of them begins, and the end."""
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        return tuple(sum(aligned[:place]) for place in range(len(aligned) + 1))

    def pack(self, plan: StepPlan) -> Int32:
        """The numbers of a plan; of nothing but padding when it has no rows."""
        num_rows, spare = plan.num_rows, self.num_tokens - plan.num_tokens
        counts = np.zeros(self.num_rows, dtype=np.int32)
        counts[:num_rows] = plan.counts
        if spare:
            counts[num_rows] = spare
        starts, slots = np.zeros_like(counts), np.zeros_like(counts)
        starts[:num_rows], slots[:num_rows] = plan.starts, plan.slots
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(np.arange(self.num_rows), counts)
        positions = np.arange(self.num_tokens) - offsets[rows] + starts[rows]
        numbers = np.zeros(self.offsets[-1], dtype=np.int32)
        for begin, part in zip(self.offsets, (positions, rows, offsets, starts, slots), strict=False):
            numbers[begin : begin + len(part)] = part
        return numbers

    def views(self, numbers: Tensor) -> list[Tensor]:
        """positions, rows, row_offsets, row_starts, row_slots."""
        return [numbers[begin : begin + size] for begin, size in zip(self.offsets, self.sizes, strict=False)]


def padded_batch(shape: StepShape, numbers: Tensor, builder: BatchBuilder) -> ForwardBatch:
    """The forward pass of a packed plan, all of it worked out on the device."""
    positions, rows, row_offsets, row_starts, row_slots = shape.views(numbers)
    slots = row_slots[rows].long()
    tokens = builder.token_ring[slots, positions % builder.token_ring.shape[1]].long()
    batch = TokenBatch(
        positions=positions,
        rows=rows,
        row_offsets=row_offsets,
        row_starts=row_starts,
        row_slots=row_slots,
        block_table=builder.block_table[:, : shape.num_columns].index_select(0, row_slots),
        window_starts=torch.zeros_like(row_starts),
        block_tokens=builder.block_tokens,
        max_position=shape.num_columns * builder.block_tokens - 1,
    )
    return ForwardBatch(tokens, None, batch, batch, None, None, shape.feeds_draft)


class Captured(Generic[Result]):
    """A call of kernels as a graph. It reads and writes the same memory at each replay."""

    def __init__(self, call: Callable[[], Result], pool: Any) -> None:
        """pool: of `torch.cuda.graph_pool_handle`, for memory that graphs share."""
        call()  # compiles what it needs
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = call()

    def replay(self) -> Result:
        """Queue the kernels; the result is overwritten by the next graph of the pool."""
        self._graph.replay()
        return self._result


class StepGraphs:
    """The captured decode steps of one engine."""

    def __init__(self, model: Model, builder: BatchBuilder) -> None:
        self._model, self._builder = model, builder
        self._graphs: dict[StepShape, Captured[tuple[Hidden, Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._numbers = torch.zeros(8 * (MAX_TOKENS + ALIGNMENT), dtype=torch.int32, device=builder.device)

    def takes(self, plan: StepPlan) -> bool:
        """Whether it is a step of decode rows alone, all past the first window of their decoder half."""
        return bool(
            0 < plan.num_tokens <= MAX_TOKENS
            and not plan.is_prefill.any()
            and plan.samples.all()
            and not plan.wants_logits.any()
            and not len(plan.logprob_rows)
            and ((plan.decoder_starts == 0) | (plan.starts - plan.decoder_starts >= self._builder.window - 1)).all()
        )

    def run(self, plan: StepPlan, *, feeds_draft: bool) -> tuple[Hidden, Tensor]:
        """What the head reads and the logits of the plan's tokens, after its block-table changes."""
        builder = self._builder
        builder.apply_changes(plan)
        shape = StepShape.of(plan, builder.block_tokens, builder.block_table.shape[1], feeds_draft=feeds_draft)
        graph = self._graphs.get(shape) or self._capture(shape)
        self._fill(shape.pack(plan))
        hidden, logits = graph.replay()
        return hidden.part(0, plan.num_tokens), logits[: plan.num_tokens]

    def _capture(self, shape: StepShape) -> Captured[tuple[Hidden, Tensor]]:
        self._fill(shape.pack(_nothing()))

        def step() -> tuple[Hidden, Tensor]:
            hidden = self._model.forward(padded_batch(shape, self._numbers, self._builder))
            return hidden, self._model.logits(hidden)

        if len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[shape] = Captured(step, self._pool)
        return self._graphs[shape]

    def _fill(self, numbers: Int32) -> None:
        self._numbers[: len(numbers)].copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)


def _nothing() -> StepPlan:
    """A plan without rows."""
    number, truth = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
    return StepPlan(0, number, number, number, number, truth, truth, truth, number, number, number, number)
