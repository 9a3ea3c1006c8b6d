"""Every kernel of a layer without indexer at the released sizes, one after the other, as a replayed graph runs them.

    PYTHONPATH=src python benchmarks/ops/layer_kernels.py [--tokens 32,1024] [--layers 4] [--context 131072]

Some layers with weights of their own (`hopper.py`), captured in one CUDA graph. Of each kernel that the profiler sees,
the mean of all replays and layers but the first and the last: from the end of the one before it to its own end, and
from its start to its end; one that starts early waits most of the latter. The line above is timed without the profiler:
what a layer more adds to a replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import hopper as sizes
import torch
from hopper import numbers
from torch.profiler import ProfilerActivity, profile

from deepinfer.ops.layers import BoundLayer, LayerCaches, LayerInputs, LayerParts, LayerState
from deepinfer.ops.table import Ops
from deepinfer.ops.values import Selection
from deepinfer.ops.weights import ExpertWeights, HyperWeights, RouterWeights, Weight
from deepinfer.rank.ops import keep_share

REPLAYS = 10


def make_parts(ops: Ops) -> LayerParts:
    """Random weights, a rank's share of the experts."""
    hidden, inner, experts = sizes.HIDDEN, sizes.INNER, sizes.EXPERTS
    width, mixes = sizes.STREAMS * hidden, (2 + sizes.STREAMS) * sizes.STREAMS

    def hyper() -> Any:
        fn = Weight(torch.randn(mixes, width, device=sizes.GPU) * width**-0.5)
        return ops.prepare_hyper(HyperWeights(fn, numbers(mixes), numbers(3), 20, 1e-6, 1e-20), sizes.norm(hidden))

    router = RouterWeights(
        sizes.plain(384, hidden), numbers(384), numbers(384), sizes.ACTIVE, "sqrtsoftplus", True, 1.5, 1.0
    )
    routed = ExpertWeights(
        sizes.fp4(experts, inner, hidden), sizes.fp4(experts, hidden, inner), sizes.fp4(experts, inner, hidden), 10.0
    )
    shared = ExpertWeights(sizes.fp8(inner, hidden), sizes.fp8(hidden, inner), sizes.fp8(inner, hidden), 10.0)
    return LayerParts(
        engram=None, engram_place=0, tap_place=None, attention_hyper=hyper(),
        attention=ops.prepare_attention(sizes.attention_weights()), compressor=None, indexer=None, expert_hyper=hyper(),
        router=ops.prepare_router(router), experts=ops.prepare_experts(routed),
        shared_expert=ops.prepare_shared_expert(shared), reads_entries=True, keeps_candidates=False,
        uses_candidates=False,
    )  # fmt: skip


def capture(ops: Ops, layers: list[BoundLayer], inputs: LayerInputs, state: LayerState) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        ops.run_layers(state, inputs, layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.run_layers(state, inputs, layers)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median of the replays."""
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def kernels(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
    """Name, start and end in us of every kernel of some replays."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    return sorted(found, key=lambda kernel: kernel[1])


def show(ops: Ops, parts: list[LayerParts], tokens: int, context: int) -> None:
    num_layers = len(parts)
    batch = sizes.make_batch(tokens, context)
    ring = sizes.window_rows((len(batch.row_slots) + 1) * 132).view(-1, 132, sizes.DIM // 32 * 33)
    pages = sizes.latent_pages(int(batch.block_table.max()) + 1, sizes.BLOCK, sizes.DIM)
    entries = torch.rand(tokens, context // 64, device=sizes.GPU).topk(sizes.TOP_K).indices.int().sort(-1).values * 63
    layers = [BoundLayer(own, LayerCaches(ring, pages, None, None)) for own in parts]
    streams, pre = ops.embed(
        torch.randint(0, 1024, (tokens,), device=sizes.GPU),
        ops.prepare_embedding(Weight(sizes.normal(1024, sizes.HIDDEN)), sizes.STREAMS),
    )
    state, inputs = LayerState(streams, pre, Selection(entries, None)), LayerInputs(batch, None, None)
    graph, fewer = (capture(ops, layers[:count], inputs, state) for count in (num_layers, 2))
    of_a_layer = (microseconds(graph) - microseconds(fewer)) / (num_layers - 2)
    found = kernels(graph)
    one_more = (len(found) - len(kernels(fewer))) // REPLAYS // (num_layers - 2)
    print(f"\n{tokens} tokens: {of_a_layer:.1f} us and {one_more} kernels a layer\n{'adds us':>8}{'runs':>8}   kernel")
    per_replay, inner = len(found) // REPLAYS, one_more * (num_layers - 2)
    first = (per_replay - inner) // 2
    lasting: list[list[float]] = [[] for _ in range(one_more)]
    added: list[list[float]] = [[] for _ in range(one_more)]
    names = [""] * one_more
    for replay in range(1, REPLAYS):
        for place in range(first, first + inner):
            at = replay * per_replay + place
            name, begin, end = found[at]
            kernel = (place - first) % one_more
            lasting[kernel].append(end - begin)
            added[kernel].append(end - found[at - 1][2])
            names[kernel] = name
    for more, lasted, name in zip(added, lasting, names, strict=True):
        print(f"{statistics.mean(more):8.2f}{statistics.mean(lasted):8.2f}   {name[:60]}")
    print(f"{sum(map(statistics.mean, added)):8.1f}           together", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32,1024")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=131072)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, context {args.context}")
    ops = sizes.Bench(args.context, [], compares=False).ours
    keep_share(ops, 64)
    parts = [make_parts(ops) for _ in range(args.layers)]
    for tokens in map(int, args.tokens.split(",")):
        show(ops, parts, tokens, args.context)


if __name__ == "__main__":
    main()
