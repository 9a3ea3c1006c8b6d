"""Sizes that decode steps are padded to, so that a few shapes serve any load, and batches of such a size.

No request's length is a shape: the block table is cut at a few widths only, and all numbers of a step lie in one
buffer that a single copy fills. What is too many belongs to the padding slot, which no op writes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Int32, StepPlan
from deepinfer.ops.batch import ForwardBatch, TokenBatch
from deepinfer.runner.batch import BatchBuilder

LEAST_COLUMNS = 16  # of the block table; then four times as many, until it is whole
ALIGNMENT = 32  # numbers; kernels are compiled for the alignment of what they read


def padded(count: int) -> int:
    """The least size that holds this many: 1, 2, 4, 8, 16, 32, 48, 64, 128, ... 256, 384, ... 1024, 1280, ..."""
    for most, step in ((64, 16), (256, 64), (1024, 128)):
        if count <= most:
            return -(-count // step) * step if count > 8 else 1 << (count - 1).bit_length()
    return -(-count // 256) * 256


@dataclass(frozen=True)
class StepShape:
    """What decides the kernels of a decode step.

    num_rows: num_tokens, or a half, a quarter, ... of it.
    num_columns: blocks that rows may have.
    """

    num_tokens: int
    num_rows: int
    num_columns: int
    feeds_draft: bool

    @classmethod
    def of(cls, plan: StepPlan, block_tokens: int, max_columns: int, *, feeds_draft: bool) -> StepShape:
        """The shape that a plan of decode rows is padded to; tokens that are too many are a row of their own."""
        wanted = plan.num_tokens
        num_tokens = num_rows = padded(wanted)
        least_rows = plan.num_rows + (num_tokens > wanted)
        while num_rows % 2 == 0 and num_rows // 2 >= least_rows:
            num_rows //= 2
        columns, least_columns = LEAST_COLUMNS, int((plan.starts + plan.counts).max() - 1) // block_tokens + 1
        while columns < least_columns:
            columns *= 4
        return cls(num_tokens, num_rows, min(columns, max_columns), feeds_draft)

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
        num_rows, numbers = plan.num_rows, np.zeros(self.offsets[-1], dtype=np.int32)
        positions, rows, offsets, starts, slots = (
            numbers[begin : begin + size] for begin, size in zip(self.offsets, self.sizes, strict=False)
        )
        starts[:num_rows], slots[:num_rows] = plan.starts, plan.slots
        plan.counts.cumsum(dtype=np.int32, out=offsets[1 : num_rows + 1])
        offsets[num_rows + 1 :] = self.num_tokens  # a row of what is too much, then rows of nothing
        counts = offsets[1:] - offsets[:-1]
        rows[:] = np.arange(self.num_rows, dtype=np.int32).repeat(counts)
        positions[:] = np.arange(self.num_tokens, dtype=np.int32) + (starts - offsets[:-1]).repeat(counts)
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
