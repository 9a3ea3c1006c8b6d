"""One rank of an expert-parallel group, alone on its card: steps of the real runner over dummy weights and caches.

What is real: every kernel of the model at full size, the router, block tables shuffled over a full pool, lengths,
drafts, sampling, and the host between steps. What is not: experts and n-gram rows of other ranks stand for the local
one at their number modulo the local count; random weights accept next to no draft, so speeds count an assumed share
of accepted drafts; nothing is exchanged between ranks, and no rank waits for another.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepinfer.backends.select import load_ops
from deepinfer.cache.pools import CachePools
from deepinfer.config.engine import ModelOptions
from deepinfer.messages import Int32, SlotSetup, StepPlan
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.model import Model
from deepinfer.model.v41.names import catalogue
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.clock import OpClock
from deepinfer.ops.transfer import Staged
from deepinfer.rank.caches import fill
from deepinfer.rank.floor import Work, floors
from deepinfer.rank.ops import keep_share
from deepinfer.rank.weights import RankWeights
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.draft_graphs import DraftGraphs
from deepinfer.runner.graph_cache import RIPE, CudaRecorder, GraphCache
from deepinfer.runner.graph_shapes import StepShape, padded_batch
from deepinfer.runner.graphs import StepGraphs, logits_memory
from deepinfer.runner.lines import Lines
from deepinfer.runner.memory import graph_bytes
from deepinfer.runner.runner import Runner
from deepinfer.runner.speculation import Speculation
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculate.policy import CheckAll

WARM_STEPS = RIPE + 1
KEPT_TOKENS = 140  # of a prompt that pass the decoder half
SPACE = 512  # positions before the end of the context where decode begins


@dataclass(frozen=True)
class Case:
    """What was measured for one kind of step; times in milliseconds, the median of the repeats and their range.

    num_tokens: that pass the model. forward_ms: on the device, drafting and sampling left out; host_ms: until the
    step's kernels are queued. ops, floors: by op, of the forward pass alone, the ops called one by one.
    """

    kind: str
    num_requests: int
    num_tokens: int
    step_ms: float
    step_low_ms: float
    step_high_ms: float
    forward_ms: float
    host_ms: float
    tokens_per_s: float
    tokens_per_s_user: float
    ops: dict[str, float]
    floors: dict[str, float]


class Rank:
    """The runner of one of `num_ranks` ranks with room for `num_requests` requests of `context` tokens."""

    def __init__(
        self, folder: Path, *, num_ranks: int, num_requests: int, context: int, num_drafts: int, acceptance: float
    ) -> None:
        self.config, self.num_ranks, self.context = ModelConfig.from_file(folder), num_ranks, context
        self.num_drafts, self.tokens_per_step = num_drafts, 1 + acceptance * num_drafts
        device = torch.device("cuda")
        ops = load_ops(ModelOptions(device="cuda"))
        keep_share(ops, num_ranks)
        self._clock = OpClock(device)
        source = RankWeights(catalogue(self.config), num_ranks, device)
        self._model = Model(self.config, ops, ModelWeights(source, self.config, None, device), drafts=True)
        layout = cache_layout(self.config, num_drafts)
        columns = -(-context // layout.block_tokens)
        pools = CachePools(layout, num_requests * columns, num_requests, device)
        fill(pools, self.config.vocab_size)
        bound = self._model.bind(pools)
        builder = BatchBuilder(ops, num_requests, columns, layout.block_tokens, bound.token_ring, bound.window)
        order = 1 + torch.randperm(num_requests * columns, device=device).int()
        builder.block_table[1:] = order.view(num_requests, columns)
        sampler = Sampler(ops, num_requests + 1, self.config.vocab_size, (), device)
        assert bound.draft is not None
        logits = logits_memory(num_requests, num_drafts, self.config.vocab_size, device)
        graphs = GraphCache(CudaRecorder(), graph_bytes(device))
        self._runner = Runner(bound, builder, sampler, graphs=StepGraphs(bound, builder, graphs, logits))
        drafts = DraftGraphs(bound.draft, builder, num_drafts, graphs, logits)
        self._drafting = Speculation(drafts, builder, sampler, CheckAll(), num_requests, ())
        self._runner.speculation = self._drafting

    def decode(self, num_requests: int, repeats: int) -> Case:
        """Steps of the newest token and all drafts of each request, at the end of the context."""
        slots = np.arange(1, num_requests + 1, dtype=np.int32)
        starts = self.context - SPACE - slots % 128
        plan = _plan(slots, starts, np.full_like(slots, 1 + self.num_drafts), is_prefill=False)
        plan.setups = [_setup(int(slot), self.context) for slot in slots]
        self._runner.execute(plan)
        plan.setups = []
        self._drafting.progress.starts[slots] = starts
        wall, host = self._steps(plan, WARM_STEPS, repeats)
        full = self._drafting.resolve(plan, None)
        assert full.num_tokens == num_requests * (1 + self.num_drafts), "every request checks all its drafts"
        work = Work(num_requests, full.num_tokens, full.num_tokens, full.num_tokens, self.context)
        return self._case(
            "decode", full, work, wall, host, self._captured_ops(full), num_requests * self.tokens_per_step
        )

    def prefill(self, num_tokens: int, length: int, repeats: int) -> Case:
        """Steps of whole prompts of this length; only their last tokens pass the decoder half."""
        num_requests = num_tokens // length
        slots = np.arange(1, num_requests + 1, dtype=np.int32)
        plan = _plan(slots, np.zeros_like(slots), np.full_like(slots, length), is_prefill=True)
        plan.decoder_starts = np.full_like(slots, max(0, length - KEPT_TOKENS))
        plan.host_tokens = np.random.default_rng(0).integers(3, self.config.vocab_size, num_tokens).astype(np.int32)
        plan.setups = [_setup(int(slot), length) for slot in slots]
        wall, host = self._steps(plan, WARM_STEPS, repeats)
        work = Work(num_requests, num_tokens, num_requests * min(length, KEPT_TOKENS), num_requests, length)
        with self._timed():
            self._clock.clear()
            self._runner.compute(plan, Lines.of(plan), feeds_draft=True)
        return self._case("prefill", plan, work, wall, host, self._clock.take_ops(), num_tokens)

    def _steps(self, plan: StepPlan, warm: int, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of them those until its kernels were queued.

        They follow one another as in an engine that has work: what the host does while the device drafts takes no time.
        """
        torch.cuda.synchronize()
        ends, host = [time.perf_counter()], []
        for _ in range(warm + repeats):
            started = time.perf_counter()
            forwarded = self._runner.forward(plan)
            host.append(time.perf_counter() - started)
            self._runner.sample(forwarded)
            ends.append(time.perf_counter())
        wall = [after - before for before, after in itertools.pairwise(ends)]
        return wall[warm:], host[warm:]

    def _captured_ops(self, plan: StepPlan) -> dict[str, float]:
        """Seconds of each op in a graph with events around all of them."""
        builder, model = self._runner.builder, self._runner.model
        shape = StepShape.of(plan, builder.block_tokens, builder.max_columns, feeds_draft=True)
        staged = Staged(shape.size, builder.device)
        shape.pack(plan, staged.host)

        def step() -> None:
            self._clock.clear()
            staged.send(shape.size)
            model.compute(padded_batch(shape, staged.numbers, builder), shape.num_tokens)

        with self._timed():
            replay = CudaRecorder().record(step)
        for _ in range(3):
            replay()
        return self._clock.take_ops()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """The model calls its ops one by one, behind the clock."""
        ops = self._model.ops
        self._model.ops = self._clock.around(ops)
        try:
            yield
        finally:
            self._model.ops = ops

    def _case(
        self,
        kind: str,
        plan: StepPlan,
        work: Work,
        wall: list[float],
        host: list[float],
        ops: dict[str, float],
        tokens: float,
    ) -> Case:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._runner.compute(plan, Lines.of(plan), feeds_draft=True)
        end.record()
        end.synchronize()
        median = statistics.median(wall)
        return Case(
            kind, work.num_rows, plan.num_tokens, 1e3 * median, 1e3 * min(wall), 1e3 * max(wall),
            begin.elapsed_time(end), 1e3 * statistics.median(host), tokens / median, tokens / median / work.num_rows,
            {name: 1e3 * value for name, value in ops.items()},
            {name: 1e3 * value for name, value in floors(self.config, work, self.num_ranks).items()},
        )  # fmt: skip


def _plan(slots: Int32, starts: Int32, counts: Int32, *, is_prefill: bool) -> StepPlan:
    nothing, yes = np.zeros(0, dtype=np.int32), np.ones(len(slots), dtype=np.bool_)
    return StepPlan(
        0, slots, starts.astype(np.int32), counts, np.zeros_like(slots), yes & is_prefill, yes, ~yes, nothing, nothing,
        nothing, nothing,
    )  # fmt: skip


def _setup(slot: int, length: int) -> SlotSetup:
    params = SamplingParams(temperature=0.0, max_tokens=SPACE, ignore_eos=True, seed=0)
    return SlotSetup(slot, params, length, np.zeros(length, dtype=np.int32))
