"""Which cache blocks are free. Block ids are 1 .. num_blocks; 0 is the padding block."""

from __future__ import annotations

import numpy as np

from deepinfer.messages import Int32


class BlockManager:
    """Hands out block ids; every id has one holder.

    The free ids are a stack, so taking or giving back n blocks is one copy of n numbers.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._stack = np.arange(num_blocks, 0, -1, dtype=np.int32)  # [:num_free] are free, the last goes first
        self._num_free = num_blocks
        self._is_held = np.zeros(num_blocks + 1, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> Int32 | None:
        """`count` block ids [count] int32, or None (and nothing taken) when fewer are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        blocks = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self._is_held[blocks] = True
        return blocks

    def free(self, blocks: Int32) -> None:
        """Take back held blocks."""
        assert self._is_held[blocks].all(), f"blocks {blocks[~self._is_held[blocks]]} are freed but not held"
        self._is_held[blocks] = False
        end = self._num_free + len(blocks)
        assert end <= self.num_blocks, f"{end} blocks are free but only {self.num_blocks} exist"
        self._stack[self._num_free : end] = blocks[::-1]
        self._num_free = end

    def check(self, held: Int32) -> None:
        """Assert that `held` (any order) and the free blocks are all blocks, each exactly once."""
        free = self._stack[: self._num_free]
        ids = np.concatenate((held, free))
        assert len(ids) == self.num_blocks, f"{len(held)} held + {len(free)} free blocks are not {self.num_blocks}"
        assert ids.min(initial=1) >= 1, "the padding block 0, or a negative id, was handed out"
        assert ids.max(initial=0) <= self.num_blocks, f"block {ids.max()} does not exist"
        counts = np.bincount(ids, minlength=self.num_blocks + 1)[1:]
        assert (counts == 1).all(), f"blocks {np.flatnonzero(counts != 1) + 1} are not held or free exactly once"
        assert self._is_held[held].all() and not self._is_held[free].any(), "held flags differ from the free stack"
