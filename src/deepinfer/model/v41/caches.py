"""What this model keeps per token and per request, as cache groups; names end in our layer index."""

from __future__ import annotations

from deepinfer.cache.groups import CacheGroup, CacheLayout
from deepinfer.model.v41.config import ModelConfig

COMPRESSED_GROUP = 16  # elements per e4m3 scale of a compressed vector
SCALE_GROUP = 32  # elements per ue8m0 scale of an index key or a window vector


def cache_layout(config: ModelConfig, num_drafts: int = 0) -> CacheLayout:
    """The cache groups of a model.

        compressed.<layer>  block  e2m1 vectors of a KV source, one per `ratio` tokens
        index.<layer>       block  its e2m1 index keys
        window.<layer>      slot   e4m3 vectors of every layer's own sliding window; of draft blocks too
        state.<layer>       slot   float32 key and score rows of a KV source with ratio > 1
        tokens              slot   int32 ids: the newest token and those that its n-grams reach

    num_drafts: tokens that are drafted in a step, 0 = the draft head is not used. So many of the newest
        tokens may be taken back, and rings are longer by as many entries.
    """
    return CacheLayout((*_block_groups(config), *_slot_groups(config, num_drafts)), config.block_tokens)


def _block_groups(config: ModelConfig) -> list[CacheGroup]:
    dim, index_dim = config.head_dim, config.index_dim
    groups = []
    for layer in config.layers:
        if layer.owns_kv:
            num_entries = config.block_tokens // layer.ratio
            for name, num_bytes in (
                (f"compressed.{layer.index}", dim // 2 + dim // COMPRESSED_GROUP),
                (f"index.{layer.index}", index_dim // 2 + index_dim // SCALE_GROUP),
            ):
                groups.append(CacheGroup(name, "block", num_bytes, num_entries, layer.ratio))
    return groups


def _slot_groups(config: ModelConfig, num_drafts: int) -> list[CacheGroup]:
    dim = config.head_dim
    lookback = config.engram.lookback if config.engram else 1
    windows = [
        CacheGroup(f"window.{layer.index}", "slot", dim + dim // SCALE_GROUP, config.window + num_drafts)
        for layer in (*config.layers, *(config.draft_layers if num_drafts else ()))
    ]
    states = [
        CacheGroup(f"state.{layer.index}", "slot", 2 * dim * 4, layer.ratio + num_drafts)
        for layer in config.layers
        if layer.owns_kv and layer.ratio > 1
    ]
    return [*windows, *states, CacheGroup("tokens", "slot", 4, lookback + 1 + num_drafts)]
