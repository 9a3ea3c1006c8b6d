"""What a model keeps per token and per request, as numbers, before any memory is taken.

A model states its `CacheGroup`s. Memory planning, allocation, transfer and tests read the same
list. Block groups are paged: block i is page i of every group, all groups of one block lying side
by side, so that a block moves as one copy. Slot groups are rings of fixed size, one per running
request. Block 0 and slot 0 exist for padding and are never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

BLOCK_TOKENS = 128
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class CacheGroup:
    """One kind of cached entry of one layer.

    name: unique, "<kind>.<layer>", as in "compressed.2".
    place: "block" (paged, lives as long as its tokens) or "slot" (ring, lives as long as its request).
    num_entries: entries in one block, or the length of one slot's ring.
    tokens_per_entry: tokens that one entry stands for (the compress ratio; 1 for rings).
    """

    name: str
    place: Literal["block", "slot"]
    bytes_per_entry: int
    num_entries: int
    tokens_per_entry: int = 1

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_entry * self.num_entries


@dataclass(frozen=True)
class CacheLayout:
    """Where each group lies inside one block and one slot."""

    groups: tuple[CacheGroup, ...]
    block_tokens: int

    @cached_property
    def block_offsets(self) -> dict[str, int]:
        return _offsets(self.block_groups)[0]

    @cached_property
    def slot_offsets(self) -> dict[str, int]:
        return _offsets(self.slot_groups)[0]

    @cached_property
    def bytes_per_block(self) -> int:
        return _offsets(self.block_groups)[1]

    @cached_property
    def bytes_per_slot(self) -> int:
        return _offsets(self.slot_groups)[1]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of block storage per token, padding not counted."""
        return sum(group.num_bytes for group in self.block_groups) / self.block_tokens

    @property
    def block_groups(self) -> tuple[CacheGroup, ...]:
        return tuple(group for group in self.groups if group.place == "block")

    @property
    def slot_groups(self) -> tuple[CacheGroup, ...]:
        return tuple(group for group in self.groups if group.place == "slot")


def block_tokens_for(ratios: Sequence[int]) -> int:
    """Tokens per block: the least multiple of every compress ratio that is at least 128."""
    step = math.lcm(*(ratio for ratio in ratios if ratio > 0)) if any(ratios) else 1
    return -(-BLOCK_TOKENS // step) * step


def _offsets(groups: Sequence[CacheGroup]) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for group in groups:
        offsets[group.name] = end
        end += -(-group.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end
