"""From a configuration to a runner: checkpoint, ops, caches and sampler put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from deepinfer import log
from deepinfer.backends.null.images import NullEncoder
from deepinfer.backends.null.runner import NullModel, NullRunner
from deepinfer.backends.select import captures_steps, choose_device, default_threads, load_ops, short_prefill
from deepinfer.cache.groups import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.checkpoint import coverage
from deepinfer.checkpoint.dummy import DummyWeights
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tensors import Source
from deepinfer.config.engine import EngineConfig, SchedulerOptions
from deepinfer.errors import ConfigError, ModelError, shown
from deepinfer.images.geometry import ImageGeometry
from deepinfer.model.registry import architecture_of, load_module
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.draft_graphs import DraftGraphs
from deepinfer.runner.drafts import Drafts
from deepinfer.runner.graph_cache import CudaRecorder, GraphCache
from deepinfer.runner.graphs import StepGraphs, logits_memory
from deepinfer.runner.images import ImageEncoder
from deepinfer.runner.memory import check_memory, count_blocks, graph_bytes
from deepinfer.runner.peak import bytes_beside_blocks, largest_steps
from deepinfer.runner.runner import Runner
from deepinfer.runner.speculation import Speculation
from deepinfer.runner.step_costs import step_costs
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculate.policy import CheckAll, CheckWorthwhile, DraftPolicy
from deepinfer.structured.rows import ConstrainedRows
from deepinfer.structured.server import GrammarServer

logger = log.get(__name__)
NULL_BLOCKS_PER_REQUEST = 16
CPU_STEP_TOKENS = 512
STEP_TOKENS = 2048


@dataclass(frozen=True)
class BuiltRunner:
    """A runner, and what a scheduler must know about it.

    max_step_tokens, max_prefill_tokens: as the options say, or chosen for this device.
    device: cpu, cuda or null.
    images, encoder: how images are prepared, and what encodes them; None if the model takes none.
    """

    runner: Runner | NullRunner
    max_step_tokens: int
    max_prefill_tokens: int
    num_blocks: int
    block_tokens: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    device: str
    grammars: GrammarServer | None = None  # None: requests cannot have grammars
    num_drafts: int = 0
    images: ImageGeometry | None = None
    encoder: ImageEncoder | NullEncoder | None = None


def build_runner(config: EngineConfig, folder: Path, eos_ids: Sequence[int] | None = None) -> BuiltRunner:
    """Load the model in `folder` onto its device and take the memory of its caches.

    eos_ids: tokens that end an answer; those of config.json when None.
    Raises ModelError, CheckpointError or ConfigError for what cannot be run.
    """
    options, num_slots = config.model, config.scheduler.max_num_requests
    architecture = architecture_of(folder)
    full = load_module(architecture, "config").ModelConfig.from_file(folder)
    model_config = full.cut(options.layers) if options.layers is not None else full
    max_model_len = _max_model_len(options.max_model_len, model_config.max_positions)
    num_drafts = _num_drafts(config.speculate.num_draft_tokens, model_config.num_drafts)
    layout: CacheLayout = load_module(architecture, "caches").cache_layout(model_config, num_drafts)
    eos_ids = _checked_eos(model_config.eos_ids if eos_ids is None else eos_ids, model_config.vocab_size)
    sizes = (layout.block_tokens, max_model_len, model_config.vocab_size, eos_ids)

    if options.device == "null":
        num_blocks = config.cache.num_blocks or max(
            num_slots * NULL_BLOCKS_PER_REQUEST, -(-max_model_len // layout.block_tokens)
        )
        null_encoder = None if model_config.images is None else NullEncoder()
        null = NullRunner(
            NullModel(model_config.vocab_size),
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            max_model_len=max_model_len,
            encoder=null_encoder,
        )
        step_tokens, prefill_tokens = _step_sizes(config.scheduler, model_config.images, None)
        return BuiltRunner(
            null,
            step_tokens,
            prefill_tokens,
            num_blocks,
            *sizes,
            "null",
            images=model_config.images,
            encoder=null_encoder,
        )

    started = time.monotonic()
    device, ops = choose_device(options), load_ops(options)
    catalogue = load_module(architecture, "names").catalogue
    source: Source
    if options.load_format == "dummy":
        source = DummyWeights(catalogue(model_config))
    else:
        source = Checkpoint(folder)
        coverage.check(source, catalogue(model_config), catalogue(full))
    has_tokenizer = (folder / "tokenizer.json").exists() or options.load_format != "dummy"
    weights = load_module(architecture, "weights").ModelWeights(
        source, model_config, folder if has_tokenizer else None, device
    )
    model = load_module(architecture, "model").Model(model_config, ops, weights, drafts=num_drafts > 0)
    step_tokens, prefill_tokens = _step_sizes(config.scheduler, model_config.images, short_prefill(device, ops))
    grammars = constraints = None
    if (folder / "tokenizer.json").exists():
        grammars = GrammarServer(folder, model_config.vocab_size, eos_ids)
        constraints = ConstrainedRows(grammars, num_slots, num_drafts)
    encoder = None if model.vision is None else ImageEncoder(model.vision, device)

    def over(num_blocks: int, captured: tuple[GraphCache, Tensor] | None) -> tuple[Runner, Drafts | None]:
        """A runner over caches of so many blocks, and what makes its drafts; captured: where graphs of steps go."""
        pools = CachePools(layout, num_blocks, num_slots, device)
        bound, num_columns = model.bind(pools), -(-max_model_len // layout.block_tokens)
        builder = BatchBuilder(ops, num_slots, num_columns, layout.block_tokens, bound.token_ring, bound.window)
        sampler = Sampler(ops, num_slots + 1, model_config.vocab_size, eos_ids, device)
        runner = Runner(bound, builder, sampler, constraints, clock=ops.clock, checker=ops.checker, encoder=encoder)
        if captured is not None:
            runner.graphs = StepGraphs(bound, builder, *captured)
        if bound.draft is None:
            return runner, None
        if captured is not None:
            return runner, DraftGraphs(bound.draft, builder, num_drafts, *captured)
        return runner, Drafts(bound.draft, builder, num_drafts)

    other_bytes, captured = 0, None
    if captures_steps(options, ops):
        other_bytes = graph_bytes(device)
        logits = logits_memory(num_slots, num_drafts, model_config.vocab_size, device)
        captured = GraphCache(CudaRecorder(), other_bytes), logits
    if device.type == "cuda" and config.cache.num_blocks is None and config.cache.kv_cache_bytes is None:
        plans = largest_steps(num_slots, num_drafts, step_tokens, max_model_len)
        other_bytes += bytes_beside_blocks(partial(over, 0, None), ops, plans, device)
    num_blocks = count_blocks(config.cache, layout, device, num_slots, max_model_len, other_bytes)
    check_memory(layout, num_blocks, num_slots, device)
    runner, drafts = over(num_blocks, captured)
    logger.info(
        "loaded %s on %s in %.1f s: %d layers, %d cache blocks of %d tokens (%.1f MiB), %d slots (%.1f MiB), "
        "%.1f MiB kept for steps and graphs",
        folder.name, device, time.monotonic() - started, model_config.num_layers, num_blocks, layout.block_tokens,
        num_blocks * layout.bytes_per_block / 2**20, num_slots, num_slots * layout.bytes_per_slot / 2**20,
        other_bytes / 2**20,
    )  # fmt: skip
    if drafts is not None:
        policy: DraftPolicy = CheckAll()
        # Choices by time change batches, and with ops that are not batch-invariant last bits. The precisions that
        # are for comparing repeat a request exactly instead; and op checks take times of their own.
        if config.speculate.draft_scheduling and options.precision == "fast" and not options.check_ops:
            threads, is_captured = options.num_threads or default_threads(), captured is not None
            key = (
                f"{folder.resolve()} {options.layers} {options.precision} {device} {ops.origin} {threads} {is_captured}"
            )
            policy = CheckWorthwhile(num_drafts, *step_costs(runner, drafts, num_slots, key))
        runner.speculation = Speculation(
            drafts, runner.builder, runner.sampler, policy, num_slots, eos_ids, config.speculate.draft_acceptance
        )
    return BuiltRunner(
        runner,
        step_tokens,
        prefill_tokens,
        num_blocks,
        *sizes,
        device.type,
        grammars,
        num_drafts,
        model_config.images,
        encoder,
    )


def _step_sizes(options: SchedulerOptions, images: ImageGeometry | None, short: int | None) -> tuple[int, int]:
    """Tokens of a step, and prompt tokens among them; `short`: of these on a device whose steps are cut short.

    Those that were asked for, else what is usual on the device; a step holds an image beside the other requests.
    """
    largest = 1 if images is None else images.max_tokens
    usual = max(STEP_TOKENS if short is None else CPU_STEP_TOKENS, options.max_num_requests - 1 + largest)
    step_tokens = options.max_step_tokens or usual
    return step_tokens, options.max_prefill_tokens or short or step_tokens


def _checked_eos(eos_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise ModelError(
                f"eos_token_id is {shown(token)}, but ids of this model are 0 to {vocab_size - 1}; "
                "correct generation_config.json or config.json"
            )
    return tuple(eos_ids)


def _num_drafts(wanted: int | None, most: int) -> int:
    """Drafts per step: as many as wanted, else as many as the draft head makes (0 = there is none)."""
    if wanted is not None and wanted > most:
        has = f"the draft head of this model makes {most} at a time" if most else "this model has no draft head"
        raise ConfigError(f"num_draft_tokens is {wanted}, but {has}; give at most {most}, or leave it out")
    return most if wanted is None else wanted


def _max_model_len(wanted: int | None, limit: int) -> int:
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}, but the model's positions end at {limit}; lower max_model_len")
    return wanted or limit
