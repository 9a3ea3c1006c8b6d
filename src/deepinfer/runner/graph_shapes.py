"""Sizes that decode steps are padded to, so that a few shapes serve any load, and batches of such a size.

No request's length is a shape: the block table is cut at a few widths only, and all numbers of a step lie in one
buffer that a single copy fills. What is too many belongs to the padding slot, which no op writes to.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

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

    @property
    def size(self) -> int:
        """Numbers of a packed plan."""
        return _layout(self.num_tokens, self.num_rows).size

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

    def pack(self, plan: StepPlan, numbers: Int32) -> None:
        """Fill the first numbers with a plan; with nothing but padding when it has no rows.

        New blocks are left out where there are more than rows: `has_room`.
        """
        num_rows, layout = plan.num_rows, _layout(self.num_tokens, self.num_rows)
        positions, rows, offsets, starts, slots, blocks, places = (numbers[part] for part in layout.parts)
        num_changes = len(plan.table_slots) if self.has_room(plan) else 0
        blocks[num_changes:], places[4 * num_changes :] = 0, 0  # the padding slot's first block, which is block zero
        if num_changes:
            blocks[:num_changes] = plan.table_blocks
            places[: 4 * num_changes].view(np.int64).reshape(-1, 2).T[:] = plan.table_slots, plan.table_columns
        starts[:num_rows], slots[:num_rows] = plan.starts, plan.slots
        starts[num_rows:] = slots[num_rows:] = offsets[0] = 0
        plan.counts.cumsum(dtype=np.int32, out=offsets[1 : num_rows + 1])
        offsets[num_rows + 1 :] = self.num_tokens  # a row of what is too much, then rows of nothing
        rows[:] = layout.count[: self.num_rows].repeat(offsets[1:] - offsets[:-1])
        np.add(layout.count, (starts - offsets[:-1])[rows], out=positions)

    def has_room(self, plan: StepPlan) -> bool:
        """Whether new blocks of a plan are among its packed numbers."""
        return len(plan.table_slots) <= self.num_rows

    def views(self, numbers: Tensor) -> list[Tensor]:
        """positions, rows, row_offsets, row_starts, row_slots, new blocks; their slots and columns [rows, 2] int64."""
        *views, places = (numbers[part] for part in _layout(self.num_tokens, self.num_rows).parts)
        return [*views, places.view(torch.int64).view(-1, 2)]


@dataclass(frozen=True)
class _Layout:
    """Where the seven lie in the buffer, in the order of `views`, its size, and 0 .. num_tokens - 1."""

    parts: tuple[slice, ...]
    size: int
    count: Int32


@functools.lru_cache(maxsize=256)
def _layout(num_tokens: int, num_rows: int) -> _Layout:
    begin, parts = 0, []
    for size in (num_tokens, num_tokens, num_rows + 1, num_rows, num_rows, num_rows, 4 * num_rows):
        parts.append(slice(begin, begin + size))
        begin += -(-size // ALIGNMENT) * ALIGNMENT
    return _Layout(tuple(parts), begin, np.arange(num_tokens, dtype=np.int32))


def packed_rows(shape: StepShape, numbers: Tensor, builder: BatchBuilder) -> TokenBatch:
    """The rows of a packed plan without their blocks: nothing but views."""
    positions, rows, row_offsets, row_starts, row_slots, *_ = shape.views(numbers)
    return TokenBatch(
        positions=positions,
        rows=rows,
        row_offsets=row_offsets,
        row_starts=row_starts,
        row_slots=row_slots,
        block_table=builder.block_table[:1, :1].expand(shape.num_rows, 1),
        window_starts=row_starts,
        block_tokens=builder.block_tokens,
        max_position=shape.num_columns * builder.block_tokens - 1,
    )


def padded_batch(shape: StepShape, numbers: Tensor, builder: BatchBuilder) -> ForwardBatch:
    """The forward pass of a packed plan, after its block-table changes, all of it worked out on the device."""
    batch, (*_, blocks, places) = packed_rows(shape, numbers, builder), shape.views(numbers)
    builder.block_table[places[:, 0], places[:, 1]] = blocks
    slots = batch.row_slots[batch.rows].long()
    tokens = builder.token_ring[slots, batch.positions % builder.token_ring.shape[1]].long()
    batch = dataclasses.replace(
        batch,
        block_table=builder.block_table[:, : shape.num_columns].index_select(0, batch.row_slots),
        window_starts=torch.zeros_like(batch.row_starts),
    )
    return ForwardBatch(tokens, None, batch, batch, None, None, shape.feeds_draft)
