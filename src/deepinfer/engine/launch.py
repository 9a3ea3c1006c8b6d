"""From a configuration to a running engine in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.cache.manager import CacheManager
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.client import EngineClient
from deepinfer.engine.core import EngineCore
from deepinfer.images.geometry import ImageGeometry
from deepinfer.runner.build import build_runner
from deepinfer.scheduler.images import ImageWork
from deepinfer.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Engine:
    """A running engine and the limits that a frontend checks requests against."""

    client: EngineClient
    max_model_len: int
    vocab_size: int
    num_cache_tokens: int  # that fit into all blocks together
    device: str  # cpu, cuda or null
    images: ImageGeometry | None  # how images are prepared; None: the model takes none


def launch(config: EngineConfig, folder: Path, eos_ids: Sequence[int] | None = None) -> Engine:
    """Load the model in `folder` and start its core.

    eos_ids: tokens that end an answer; the model configuration's when None.
    """
    built = build_runner(config, folder, eos_ids)
    options = dataclasses.replace(
        config.scheduler, max_step_tokens=built.max_step_tokens, max_prefill_tokens=built.max_prefill_tokens
    )
    cache = CacheManager(built.num_blocks, options.max_num_requests, built.block_tokens, built.max_model_len)
    scheduler = Scheduler(
        options,
        cache,
        eos_token_ids=built.eos_ids,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        decoder_replay=config.model.decoder_replay,
        replay_keep_tokens=config.model.replay_keep_tokens,
        num_drafts=built.num_drafts,
        images=None
        if built.images is None
        else ImageWork(config.images, options.max_queue, built.images.bytes_per_token),
    )
    core = EngineCore(scheduler, cache, built.runner, built.encoder, is_async=options.async_scheduling)
    num_cache_tokens = built.num_blocks * built.block_tokens
    client = EngineClient(core, built.grammars, max_queue=options.max_queue)
    return Engine(client, built.max_model_len, built.vocab_size, num_cache_tokens, built.device, built.images)
