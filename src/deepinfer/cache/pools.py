"""Device memory of all caches: one tensor of blocks and one of slots, with a view for each group."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.groups import CacheGroup, CacheLayout


class CachePools:
    """Owns the packed bytes of every cache group on one device.

    blocks: [num_blocks + 1, bytes per block] uint8; slots: [num_slots + 1, bytes per slot] uint8.
    Row 0 of both is padding: zeros, never written.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, num_slots: int, device: torch.device):
        self.layout = layout
        self.blocks = torch.zeros(num_blocks + 1, layout.bytes_per_block, dtype=torch.uint8, device=device)
        self.slots = torch.zeros(num_slots + 1, layout.bytes_per_slot, dtype=torch.uint8, device=device)
        self._groups = {group.name: group for group in layout.groups}
        self._views = {group.name: self._view(group) for group in layout.groups}

    def rows(self, name: str) -> Tensor:
        """Packed entries of a group: [blocks or slots, entries, bytes per entry] uint8, a view."""
        return self._views[name]

    def numbers(self, name: str, dtype: torch.dtype) -> Tensor:
        """A slot group whose entries are plain numbers: [slots, entries, numbers per entry], a view."""
        group = self._groups[name]
        assert group.place == "slot", name
        start = self.layout.slot_offsets[name]
        flat = self.slots[:, start : start + group.num_bytes].view(dtype)
        entries: Tensor = flat.unflatten(1, (group.num_entries, -1))
        return entries

    def _view(self, group: CacheGroup) -> Tensor:
        is_block = group.place == "block"
        pool = self.blocks if is_block else self.slots
        start = (self.layout.block_offsets if is_block else self.layout.slot_offsets)[group.name]
        rows: Tensor = pool[:, start : start + group.num_bytes].unflatten(1, (group.num_entries, group.bytes_per_entry))
        return rows
