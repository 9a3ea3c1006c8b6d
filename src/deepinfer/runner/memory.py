"""How many cache blocks an engine gets."""

from __future__ import annotations

import os

import torch

from deepinfer.cache.groups import CacheLayout
from deepinfer.config.engine import CacheOptions
from deepinfer.errors import ConfigError

HOST_SHARE = 0.25  # of free memory; other programs live on a host
DEVICE_SHARE = 0.95  # of free memory on an accelerator; images are encoded in the rest, and torch loses some to pieces
GRAPH_SHARE = 0.05  # of an accelerator's memory, for what graphs of steps hold; more than those of 2,048 tokens take


def count_blocks(
    options: CacheOptions,
    layout: CacheLayout,
    device: torch.device,
    max_requests: int,
    max_model_len: int,
    other_bytes: int = 0,
) -> int:
    """Blocks to allocate: what the options say, else enough for every request at full length, if memory allows.

    other_bytes: of free memory that steps and graphs will take.
    Raises ConfigError when not even one block fits.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    limit = options.kv_cache_bytes
    wanted = max_requests * -(-max_model_len // layout.block_tokens)
    if layout.bytes_per_block == 0:  # a window-only model keeps nothing in blocks
        return wanted
    block = f"one block of {layout.block_tokens} tokens takes {layout.bytes_per_block} bytes"
    if limit is not None and limit < layout.bytes_per_block:
        raise ConfigError(f"kv_cache_bytes is {limit}, but {block}; raise kv_cache_bytes")
    if limit is None:
        left = free_bytes(device) - other_bytes
        if left < layout.bytes_per_block:
            raise ConfigError(
                f"weights, steps and graphs leave {left} bytes of {device} to the cache, but {block}; "
                "lower max_step_tokens or max_num_requests"
            )
        limit = min(left, wanted * layout.bytes_per_block)
    return limit // layout.bytes_per_block


def check_memory(layout: CacheLayout, num_blocks: int, num_slots: int, device: torch.device) -> None:
    """Raise ConfigError when these caches cannot fit the device, even if nothing else were there."""
    wanted = (num_blocks + 1) * layout.bytes_per_block + (num_slots + 1) * layout.bytes_per_slot
    if wanted > (total := total_bytes(device)):
        raise ConfigError(
            f"{num_blocks} cache blocks and {num_slots} slots (max_num_requests) take {wanted} bytes, but "
            f"{device} has {total}; lower num_blocks, kv_cache_bytes or max_num_requests"
        )


def total_bytes(device: torch.device) -> int:
    """All memory of this device, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def graph_bytes(device: torch.device) -> int:
    """Bytes that graphs may hold on this device."""
    return int(total_bytes(device) * GRAPH_SHARE)


def free_bytes(device: torch.device) -> int:
    """Bytes that the caches may take on this device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE)
