"""The pass over blocks of drafts as CUDA graphs, see `graphs.py`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.runner.graphs import Captured, padded
from deepinfer.runner.speculation import DraftHead


@dataclasses.dataclass(frozen=True)
class Block:
    """A captured pass over blocks: what it reads, which is filled in before each replay."""

    tokens: Tensor  # [rows] int64
    batch: TokenBatch
    graph: Captured[tuple[Tensor, Tensor]]


class DraftGraphs:
    """A draft head whose passes over blocks are captured, by their rows."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._blocks: dict[tuple[int, int], Block] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """See `DraftHead`; rows that are too many belong to the padding slot. Valid until the next pass."""
        num_rows, num_places = len(tokens), batch.num_tokens // len(tokens)
        key = padded(num_rows), num_places
        block = self._blocks.get(key) or self._capture(batch, *key)
        block.tokens[:num_rows] = tokens
        for name in ("row_starts", "row_slots", "window_starts"):
            getattr(block.batch, name)[:num_rows] = getattr(batch, name)
            getattr(block.batch, name)[num_rows:] = 0
        block.batch.positions[: batch.num_tokens] = batch.positions
        x, logits = block.graph.replay()
        return x[: batch.num_tokens], logits[: batch.num_tokens]

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        return self._head.next(logits, x, previous)

    def _capture(self, like: TokenBatch, num_rows: int, num_places: int) -> Block:
        device = like.positions.device
        count = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        batch = dataclasses.replace(
            like,
            positions=torch.arange(num_places, dtype=torch.int32, device=device).repeat(num_rows),
            rows=count[:-1].repeat_interleave(num_places),
            row_offsets=count * num_places,
            row_starts=torch.zeros_like(count[:-1]),
            row_slots=torch.zeros_like(count[:-1]),
            block_table=like.block_table[:1].expand(num_rows, -1),
            window_starts=torch.zeros_like(count[:-1]),
        )
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

        def step() -> tuple[Tensor, Tensor]:
            return self._head.block(tokens, dataclasses.replace(batch))  # what ops derive is made anew in the graph

        block = self._blocks[num_rows, num_places] = Block(tokens, batch, Captured(step, self._pool))
        return block
