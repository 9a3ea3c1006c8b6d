"""The pass over blocks of drafts as CUDA graphs, and with it the draws of all drafts where nothing changes logits.

All numbers of a pass lie in one buffer that a single copy fills; the rest is worked out on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer.messages import Int32
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.transfer import Staged
from deepinfer.ops.values import DrawKeys
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.drafts import DraftHead, DraftRows, Drafts, Verify
from deepinfer.runner.graph_cache import GraphCache
from deepinfer.runner.graph_shapes import ALIGNMENT, padded
from deepinfer.sampling.sampler import PlainDraws

Kind = Literal["logits", "likeliest", "drawn"]  # what the pass gives
NUM_COLUMNS = 5  # numbers of a row: slot, window start, temperature, two halves of the seed


@dataclass(frozen=True)
class BlockShape:
    """What decides the kernels of a pass."""

    num_rows: int
    num_places: int
    kind: Kind

    @property
    def stride(self) -> int:
        """Numbers from one column in the buffer to the next."""
        return -(-self.num_rows // ALIGNMENT) * ALIGNMENT

    def pack(self, rows: DraftRows, draws: PlainDraws | None, numbers: Int32) -> None:
        """Fill the first numbers with some rows; those that are too many belong to the padding slot."""
        count, columns = len(rows), numbers[: NUM_COLUMNS * self.stride].reshape(NUM_COLUMNS, self.stride)
        columns[:2, :count], columns[:, count:] = (rows.slots, rows.window_starts), 0
        if draws is not None:
            columns[2, :count] = draws.temperature.view(np.int32)
            columns[3:].reshape(-1).view(np.int64)[:count] = draws.seeds

    def views(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """slots, window starts [rows] int32, temperature float32, seeds int64."""
        columns = numbers[: NUM_COLUMNS * self.stride].view(NUM_COLUMNS, self.stride)
        slots, window_starts, heat = columns[:3, : self.num_rows]
        return slots, window_starts, heat.view(torch.float32), columns[3:].flatten().view(torch.int64)[: self.num_rows]


@dataclass(frozen=True)
class Block:
    """A captured pass, its two results, and what it reads that never changes."""

    replay: Callable[[], None]
    results: list[Tensor]
    constants: tuple[Tensor, ...]


class DraftGraphs(Drafts):
    """A draft head whose passes over blocks are captured; results are valid until the next pass or step.

    logits: [most, vocab] float32, memory for those of blocks; it may be that of a step's logits.
    """

    def __init__(
        self, head: DraftHead, builder: BatchBuilder, num_places: int, graphs: GraphCache, logits: Tensor
    ) -> None:
        super().__init__(head, builder, num_places)
        self._graphs, self._logits = graphs, logits
        most = len(logits) + ALIGNMENT
        self._staged, self._newest = (Staged(columns * most, builder.device) for columns in (NUM_COLUMNS, 2))

    def block(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """See `Drafts`."""
        return self._run(self._shape(rows, None), rows, None) or super().block(rows)

    def draft(self, rows: DraftRows, draws: PlainDraws) -> tuple[Tensor, Tensor]:
        """See `Drafts`."""
        return self._run(self._shape(rows, draws), rows, draws) or super().draft(rows, draws)

    def follow(self, rows: DraftRows, draws: PlainDraws, verify: Verify) -> tuple[Tensor, Tensor] | None:
        """See `Drafts`; None unless the pass is captured already."""
        shape = self._shape(rows, draws)
        return self._run(shape, rows, draws, verify) if self._graphs.has(shape) else None

    def _shape(self, rows: DraftRows, draws: PlainDraws | None) -> BlockShape:
        kind: Kind = "logits" if draws is None else "drawn" if draws.temperature.any() else "likeliest"
        return BlockShape(padded(len(rows)), self.num_places, kind)

    def _run(
        self, shape: BlockShape, rows: DraftRows, draws: PlainDraws | None, verify: Verify | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """verify: what finds newest tokens and starts; None = `rows` has them."""
        if shape.num_rows * shape.num_places > len(self._logits):
            return None
        block = self._graphs.find(shape, lambda: self._record(shape))
        if block is None:
            return None
        shape.pack(rows, draws, self._staged.host)
        newest = 2 * shape.stride
        if verify is not None:
            verify(self._newest.numbers[:newest].view(2, -1)[:, : len(rows)])
        else:
            self._newest.host[:newest].reshape(2, -1)[:, : len(rows)] = rows.newest, rows.starts
            self._newest.send(newest)
        block.replay()
        first, second = (result[: len(result) // shape.num_rows * len(rows)] for result in block.results)
        return first, second

    def _record(self, shape: BlockShape) -> Block:
        num_rows, num_places, device = shape.num_rows, shape.num_places, self._builder.device
        place = torch.arange(num_places, dtype=torch.int32, device=device)
        count = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        owners, offsets = count[:-1].repeat_interleave(num_places), count * num_places
        self._staged.host[:] = self._newest.host[:] = 0
        self._newest.send(2 * shape.stride)
        results: list[Tensor] = []

        def passes() -> None:
            self._staged.send(NUM_COLUMNS * shape.stride)
            slots, window_starts, heat, seeds = shape.views(self._staged.numbers)
            newest, starts = self._newest.numbers[: 2 * shape.stride].view(2, -1)[:, :num_rows]
            batch = TokenBatch(
                positions=(starts.unsqueeze(1) + place).flatten(),
                rows=owners,
                row_offsets=offsets,
                row_starts=starts,
                row_slots=slots,
                block_table=self._builder.block_table[:1, :1].expand(num_rows, 1),
                window_starts=window_starts,
                block_tokens=self._builder.block_tokens,
                max_position=torch.iinfo(torch.int32).max,  # of any later pass
                is_block=True,
            )
            if shape.kind == "logits":
                x, logits = self._head.block(newest.long(), batch)
                results[:] = x, self._logits[: len(logits)].copy_(logits)
                return
            keys = DrawKeys(heat, seeds, starts.long() + 1) if shape.kind == "drawn" else None
            results[:] = self._head.draft(newest.long(), batch, keys)
            self._builder.store_ahead(results[0], batch)

        return Block(self._graphs.recorder.record(passes), results, (place, owners, offsets))
