"""Time of the ops that read and write caches, one call each, at a model's shapes: a table in microseconds.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/ops/caches.py [--model FOLDER] [--backend cpu] [--threads 1]
        [--repeats 200] [--only attend]

Cases: one request and 64 requests that decode at position 200, a prompt chunk of 2,048 tokens, one request that
decodes at position 5,000. Layers: the first of each ratio that owns keys and an index, and the first one that selects
among candidates. Keys are packed random vectors. The least and the median time of a call are shown, Python included.
Before timing, selections and results are compared with the reference's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.cache.pools import CachePools
from deepinfer.checkpoint.hub import resolve
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import LayerPlan, ModelConfig
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build

CASES = {
    "1 row, 200": (1, 200, 1),
    "64 rows, 200": (64, 200, 1),
    "chunk of 2048": (1, 0, 2048),
    "1 row, 5000": (1, 5000, 1),
}


def make_batch(config: ModelConfig, rows: int, start: int, count: int) -> TokenBatch:
    """Each row continues the request of slot row + 1 at `start` by `count` tokens."""
    columns = -(-(start + count) // config.block_tokens)
    row = torch.arange(rows, dtype=torch.int32)
    return TokenBatch(
        positions=(start + torch.arange(count, dtype=torch.int32)).repeat(rows),
        rows=row.repeat_interleave(count),
        row_offsets=torch.arange(rows + 1, dtype=torch.int32) * count,
        row_starts=torch.full_like(row, start),
        row_slots=row + 1,
        block_table=row.unsqueeze(1) * columns + torch.arange(1, columns + 1, dtype=torch.int32),
        window_starts=torch.zeros_like(row),
        block_tokens=config.block_tokens,
        max_position=start + count - 1,
    )


def filled_caches(config: ModelConfig, batch: TokenBatch) -> CachePools:
    pools = CachePools(cache_layout(config), batch.block_table.numel(), len(batch.row_slots), torch.device("cpu"))
    packers = {"window": quant.pack_window, "compressed": quant.pack_compressed, "index": quant.pack_index}
    for group in pools.layout.groups:
        kind = group.name.split(".")[0]
        if kind in packers:
            cache = pools.rows(group.name)
            dim = config.index_dim if kind == "index" else config.head_dim
            for part in cache:
                part.copy_(packers[kind](torch.randn(part.shape[0], dim)))
    return pools


def calls_of(
    ops: Ops, config: ModelConfig, plan: LayerPlan, weights: ModelWeights, batch: TokenBatch
) -> dict[str, Callable[[], Any]]:
    """The cache ops of one layer on random inputs."""
    pools, tokens = filled_caches(config, batch), batch.num_tokens
    attention = ops.prepare_attention(weights.attention(plan.index))
    x = torch.randn(tokens, config.hidden_size)
    low_rank, q, rows = ops.attention_inputs(x, batch.positions, attention)
    ring, pages, index_pages = (
        pools.rows(f"{name}.{number}")
        for name, number in (("window", plan.index), ("compressed", plan.kv_source), ("index", plan.kv_source))
    )
    calls: dict[str, Callable[[], Any]] = {"store_window": lambda: ops.store_window(rows, batch, ring)}
    if plan.owns_kv:
        compressor = ops.prepare_compressor(weights.compressor(plan.index))
        state = pools.numbers(f"state.{plan.index}", torch.float32).unflatten(-1, (2, -1)) if plan.ratio > 1 else None
        calls["compress"] = lambda: ops.compress(x, batch, compressor, state, pages, index_pages)
    indexer = ops.prepare_indexer(weights.indexer(plan.index))
    given = some_candidates(config, batch) if plan.uses_candidates else None
    calls["select"] = lambda: ops.select(x, low_rank, batch, indexer, index_pages, given)
    entries = ops.select(x, low_rank, batch, indexer, index_pages, given).entries
    calls["attend"] = lambda: ops.attend(q, rows, batch, ring, pages, entries, attention)
    return calls


def some_candidates(config: ModelConfig, batch: TokenBatch) -> Tensor:
    """Random blocks of each token, ascending, -1 where there are fewer."""
    size, count = config.candidate_size, config.candidate_blocks
    blocks = (batch.positions + size) // size
    found = torch.full((batch.num_tokens, count), -1, dtype=torch.int32)
    for token, most in enumerate(blocks.tolist()):
        chosen = torch.randperm(most)[:count].sort().values
        found[token, : len(chosen)] = chosen
    return found


def check(ops: Ops, reference: Ops, config: ModelConfig, plan: LayerPlan, weights: ModelWeights) -> None:
    """On the same inputs, both sets must select and attend alike."""
    results = []
    for table in (ops, reference):
        torch.manual_seed(1)
        calls = calls_of(table, config, plan, weights, make_batch(config, 4, 300, 2))
        results.append((calls["select"]().entries, calls["attend"]()))
    (entries, attended), (other_entries, other) = results
    agreement = float((entries == other_entries).float().mean())
    error = float((attended - other).norm() / other.norm())
    assert agreement > 0.9 and error < 0.05, f"{agreement:.0%} of the entries agree, and results to {error:.1e}"


def measure(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    seconds = []
    began = time.perf_counter()
    while len(seconds) < 3 or (len(seconds) < repeats and time.perf_counter() - began < 5):
        start = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - start) * 1e6)
    return min(seconds), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or hub id; the small model by default")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", help="one op")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    folder = resolve(arguments.model)
    config = ModelConfig.from_file(folder / "config.json")
    weights = ModelWeights(Checkpoint(folder), config, folder, torch.device("cpu"))
    sets = {"reference": reference_ops("fast")}
    reference = build(sets)
    if arguments.backend == "cpu":
        native().set_num_threads(arguments.threads)
        sets["cpu"] = cpu_ops()
    ops = build(sets)
    sources = [plan for plan in config.layers if plan.owns_index]
    layers = {"candidates" if plan.uses_candidates else f"ratio {plan.ratio}": plan for plan in reversed(sources)}
    for layer, plan in layers.items():
        check(ops, reference, config, plan, weights)
        for case, shape in CASES.items():
            for name, call in calls_of(ops, config, plan, weights, make_batch(config, *shape)).items():
                if arguments.only in (None, name):
                    least, median = measure(call, arguments.repeats)
                    print(f"{layer:<12}{case:<16}{name:<14}{least:>12.1f}{median:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
