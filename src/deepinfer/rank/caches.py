"""Caches full of random entries in their packed formats, as if every request had come a long way."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.groups import CacheGroup
from deepinfer.cache.pools import CachePools

PART = 8192  # blocks or slots that are drawn at a time
SCALES = {"compressed": (16, 40, 56), "index": (32, 119, 122), "window": (32, 119, 122)}  # group, bytes from, below


def fill(pools: CachePools, vocab_size: int) -> None:
    """Random codes with scales that keep vectors near one; the padding block and slot stay zero."""
    for group in pools.layout.groups:
        kind = group.name.partition(".")[0]
        if kind == "tokens":
            ring = pools.numbers(group.name, torch.int32)[1:]
            ring.copy_(torch.randint(3, vocab_size, ring.shape, device=ring.device))
        elif kind == "state":
            pools.numbers(group.name, torch.float32)[1:].normal_()
        else:
            for part in pools.rows(group.name)[1:].split(PART):
                part.copy_(_entries(kind, group, part))


def _entries(kind: str, group: CacheGroup, like: Tensor) -> Tensor:
    """Codes, and behind them the scales."""
    size, low, high = SCALES[kind]
    per_group = size if kind == "window" else size // 2  # bytes of codes: e4m3, or two e2m1
    num_groups = group.bytes_per_entry // (per_group + 1)
    shape, device = like.shape[:2], like.device
    codes = torch.randint(0, 256, (*shape, num_groups * per_group), dtype=torch.uint8, device=device)
    if kind == "window":
        codes &= 0xB7  # no exponent that is NaN
    scales = torch.randint(low, high, (*shape, num_groups), dtype=torch.uint8, device=device)
    return torch.cat([codes, scales], dim=-1)
