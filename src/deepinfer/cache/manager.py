"""CacheManager: the scheduler's one door to slots and blocks."""

from __future__ import annotations

import numpy as np

from deepinfer.cache.blocks import BlockManager
from deepinfer.cache.slots import SlotManager
from deepinfer.messages import Bool, Int32


class CacheManager:
    """Slots, their blocks, and the block table that the device keeps a copy of.

    block_table: [num_slots + 1, max_columns] int32; column c of a slot holds the block of
        positions c * block_tokens onwards, 0 where there is none. Owned here, read anywhere.
    num_slot_blocks: [num_slots + 1] int32, blocks held by each slot.

    Entries at or past a slot's blocks are always 0, also on the device: releasing a slot puts
    zeros into its row, and `take_changes` hands those out like any other change. So a stale id
    can neither be read through a row nor name a block that has another holder by now.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_tokens: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.block_tokens = block_tokens
        self.max_columns = self.blocks_for(max_model_len)
        self.block_table = np.zeros((num_slots + 1, self.max_columns), dtype=np.int32)
        self.num_slot_blocks = np.zeros(num_slots + 1, dtype=np.int32)
        self.max_held_blocks = 0
        self._blocks = BlockManager(num_blocks)
        self._slots = SlotManager(num_slots)
        self._changes: set[int] = set()  # flat indices into block_table

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks held now; `max_held_blocks` is the most so far."""
        return self.num_blocks - self._blocks.num_free

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def can_admit(self, num_tokens: int, *, reserve_blocks: int = 0) -> bool:
        """Whether a slot and blocks for `num_tokens` are free, with `reserve_blocks` left over."""
        return self.num_free_slots > 0 and self.blocks_for(num_tokens) + reserve_blocks <= self.num_free_blocks

    def admit(self, num_tokens: int) -> int | None:
        """A slot with blocks for `num_tokens`, or None (and nothing taken) when either is short."""
        if not self.can_admit(num_tokens):
            return None
        slot = self._slots.allocate()
        assert slot is not None and self.grow(slot, num_tokens), "admission failed after its check"
        return slot

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give a held slot blocks for `num_tokens` in all; False (and nothing taken) when too few are free."""
        assert self._slots.is_held(slot), f"slot {slot} grows but is not held"
        start, end = int(self.num_slot_blocks[slot]), self.blocks_for(num_tokens)
        if end <= start:
            return True
        assert end <= self.max_columns, f"{num_tokens} tokens are too many for a slot of {self.max_columns} blocks"
        blocks = self._blocks.allocate(end - start)
        if blocks is None:
            return False
        self._write(slot, start, blocks)
        self.num_slot_blocks[slot] = end
        self.max_held_blocks = max(self.max_held_blocks, self.num_held_blocks)
        return True

    def needs_blocks(self, slots: Int32, num_tokens: Int32) -> Bool:
        """Which of the slots must grow to hold `num_tokens` [slots] tokens each."""
        return num_tokens > self.num_slot_blocks[slots] * self.block_tokens

    def release_blocks(self, slot: int) -> None:
        """Take back a slot's blocks but not the slot."""
        assert self._slots.is_held(slot), f"blocks of slot {slot} are released but it is not held"
        count = int(self.num_slot_blocks[slot])
        if count:
            self._blocks.free(self.block_table[slot, :count])
            self._write(slot, 0, np.zeros(count, dtype=np.int32))
            self.num_slot_blocks[slot] = 0

    def release(self, slot: int) -> None:
        """Take back a slot and its blocks."""
        self.release_blocks(slot)
        self._slots.free(slot)

    def take_changes(self) -> tuple[Int32, Int32, Int32]:
        """Table entries changed since the last call: (slots, columns, blocks), each entry once, as it is now."""
        if not self._changes:
            return (np.zeros(0, dtype=np.int32),) * 3
        entries = np.fromiter(self._changes, dtype=np.int32, count=len(self._changes))
        entries.sort()
        self._changes.clear()
        slots, columns = np.divmod(entries, np.int32(self.max_columns))
        return slots, columns, self.block_table[slots, columns]

    def check(self) -> None:
        """Assert that free + held blocks are all blocks, none is held twice, and the table agrees."""
        is_used = np.arange(self.max_columns) < self.num_slot_blocks[:, None]
        assert not self.block_table[~is_used].any(), "the block table has an entry past a slot's blocks"
        held = self.block_table[is_used]
        assert len(held) == self.num_slot_blocks.sum(), "a slot holds more blocks than the table has columns"
        self._blocks.check(held)
        self._slots.check()
        for slot in np.flatnonzero(self.num_slot_blocks).tolist():
            assert self._slots.is_held(slot), f"slot {slot} is free but holds blocks"

    def _write(self, slot: int, column: int, blocks: Int32) -> None:
        self.block_table[slot, column : column + len(blocks)] = blocks
        first = slot * self.max_columns + column
        self._changes.update(range(first, first + len(blocks)))
