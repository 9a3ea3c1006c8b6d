"""Small caches and batches for op tests: blocks are handed out shuffled, unowned bytes can be poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch

BLOCK_TOKENS = 120  # a multiple of the ratios 1 to 5


def make_batch(
    stretches: list[tuple[int, int, int]],
    *,
    tables: dict[int, list[int]] | None = None,
    window_starts: list[int] | None = None,
    block_tokens: int = BLOCK_TOKENS,
    is_block: bool = False,
) -> TokenBatch:
    """One row per (slot, start, count); tables: slot -> block numbers."""
    tables = tables or {}
    columns = max([len(tables.get(slot, [])) for slot, _, _ in stretches] + [1])
    counts = [count for _, _, count in stretches]
    table = [tables.get(slot, []) + [0] * (columns - len(tables.get(slot, []))) for slot, _, _ in stretches]
    positions = [start + i for _, start, count in stretches for i in range(count)]
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return TokenBatch(
        positions=ints(positions),
        rows=ints(rows),
        row_offsets=ints(offsets),
        row_starts=ints([start for _, start, _ in stretches]),
        row_slots=ints([slot for slot, _, _ in stretches]),
        block_table=ints(table).view(len(stretches), columns),
        window_starts=ints(window_starts or [0] * len(stretches)),
        block_tokens=block_tokens,
        max_position=max(positions, default=-1),
        is_block=is_block,
    )


def shuffled_tables(lengths: dict[int, int], seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> dict[int, list[int]]:
    """Blocks for slots of these lengths in tokens, from 1 on, in no order."""
    needs = {slot: -(-length // block_tokens) for slot, length in lengths.items()}
    free = list(range(1, sum(needs.values()) + 2))
    random.Random(seed).shuffle(free)
    return {slot: [free.pop() for _ in range(need)] for slot, need in needs.items()}


def num_blocks(tables: dict[int, list[int]]) -> int:
    return max([block for blocks in tables.values() for block in blocks], default=0) + 2


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, count) of chunks of this size; the last may be shorter."""
    for start in range(0, length, size):
        yield start, min(size, length - start)


def poisoned(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A cache whose bytes are NaN wherever the format has one; slot and block 0 are zero, as an engine makes them."""
    cache = torch.full(shape, 0xFF if dtype == torch.uint8 else torch.nan, dtype=dtype)
    cache[0] = 0
    return cache
