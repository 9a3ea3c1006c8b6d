"""The pass over blocks of drafts as CUDA graphs, and with it the draws of all drafts where nothing changes logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.values import DrawKeys
from deepinfer.runner.graph_cache import GraphCache
from deepinfer.runner.graph_shapes import padded
from deepinfer.runner.speculation import DraftHead

Kind = Literal["logits", "likeliest", "drawn"]  # what the pass gives


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """What decides the kernels of a pass."""

    num_rows: int
    num_places: int
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Block:
    """A captured pass: what it reads, which is filled in before each replay, and the two results."""

    tokens: Tensor  # [rows] int64
    batch: TokenBatch
    keys: DrawKeys  # of rows; used where tokens are drawn
    replay: Callable[[], None]
    results: list[Tensor]


class DraftGraphs:
    """A draft head whose passes over blocks are captured; results are valid until the next pass or step.

    logits: [most, vocab] float32, memory for those of blocks; it may be that of a step's logits.
    """

    def __init__(self, head: DraftHead, graphs: GraphCache, logits: Tensor) -> None:
        self._head, self._graphs, self._logits = head, graphs, logits

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        return self._run(tokens, batch, "logits", None) or self._head.block(tokens, batch)

    def draft(self, tokens: Tensor, batch: TokenBatch, keys: DrawKeys | None) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        kind: Kind = "likeliest" if keys is None else "drawn"
        return self._run(tokens, batch, kind, keys) or self._head.draft(tokens, batch, keys)

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        return self._head.next(logits, x, previous)

    def _run(
        self, tokens: Tensor, batch: TokenBatch, kind: Kind, keys: DrawKeys | None
    ) -> tuple[Tensor, Tensor] | None:
        """Rows that are too many belong to the padding slot."""
        num_rows, num_places = len(tokens), batch.num_tokens // len(tokens)
        shape = BlockShape(padded(num_rows), num_places, kind)
        if shape.num_rows * num_places > len(self._logits):
            return None
        block = self._graphs.find(shape, lambda: self._record(shape, batch))
        if block is None:
            return None
        block.tokens[:num_rows] = tokens
        for name in ("row_starts", "row_slots", "window_starts"):
            getattr(block.batch, name)[:num_rows] = getattr(batch, name)
            getattr(block.batch, name)[num_rows:] = 0
        block.batch.positions[: batch.num_tokens] = batch.positions
        if keys is not None:
            for name in ("temperature", "seeds", "positions"):
                getattr(block.keys, name)[:num_rows] = getattr(keys, name)
        block.replay()
        first, second = (result[: len(result) // shape.num_rows * num_rows] for result in block.results)
        return first, second

    def _record(self, shape: BlockShape, like: TokenBatch) -> Block:
        device, num_rows = like.positions.device, shape.num_rows
        count = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        batch = dataclasses.replace(
            like,
            positions=torch.arange(shape.num_places, dtype=torch.int32, device=device).repeat(num_rows),
            rows=count[:-1].repeat_interleave(shape.num_places),
            row_offsets=count * shape.num_places,
            row_starts=torch.zeros_like(count[:-1]),
            row_slots=torch.zeros_like(count[:-1]),
            block_table=like.block_table[:1].expand(num_rows, -1),
            window_starts=torch.zeros_like(count[:-1]),
            max_position=torch.iinfo(torch.int32).max,  # later passes stand further on than this one
        )
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        keys = DrawKeys(torch.zeros(num_rows, device=device), torch.zeros_like(tokens), torch.zeros_like(tokens))
        results: list[Tensor] = []

        def passes() -> None:
            own = dataclasses.replace(batch)  # what ops derive is made anew in the graph
            if shape.kind != "logits":
                results[:] = self._head.draft(tokens, own, keys if shape.kind == "drawn" else None)
                return
            x, logits = self._head.block(tokens, own)
            results[:] = x, self._logits[: len(logits)].copy_(logits)

        return Block(tokens, batch, keys, self._graphs.recorder.record(passes), results)
