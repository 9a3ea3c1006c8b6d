"""Time of the Hopper ops at the released sizes, each beside the time that its bytes and products need at least.

    PYTHONPATH=src python benchmarks/ops/hopper.py [--tokens 8,32,1024,4096] [--only experts] [--context 131072]

Random weights in the checkpoint's formats, one layer of them, 6 routed experts (a rank's share of 384 at 64 ranks), a
context of the given length for each of tokens / 4 requests (at most 256), block tables shuffled over one pool. Calls
are captured in a CUDA graph, several sets of weights in turn where one would stay in the L2 cache; the median of the
replays is shown. Before timing, 8 tokens go through the reference with float64 sums, and the worst row's difference
is shown: an output is rounded to bf16 (2e-3), and a rounding to fp8 that falls the other way counts for more.

Floor: the larger of bytes (each input and output once) over 4.3 TB/s and products over 1,467 TFLOP/s (fp8 and fp4
weights) or 802 (bf16), which a large copy and large products reach on this card (8192 cubed, torch 2.11).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.cuda.hopper.attended import AttendedPanels, group_panels
from deepinfer.backends.cuda.hopper.ops import hopper_ops
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import indexer as reference
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.table import Ops, build
from deepinfer.ops.values import Attended, Mix, Selection
from deepinfer.ops.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    NormWeights,
    RopeSpec,
    RouterWeights,
    Weight,
)

BYTES_PER_S, FP8_PER_S, BF16_PER_S = 4.3e12, 1467e12, 802e12
HIDDEN, STREAMS, HEADS, DIM, RANK, GROUPS, OUT_RANK, INNER = 5120, 4, 64, 512, 1280, 8, 1024, 2304
INDEX_HEADS, INDEX_DIM, TOP_K, EXPERTS, ACTIVE, VOCAB, BLOCK = 32, 128, 512, 6, 6, 129280, 128
ENGRAM_ROWS = 1 << 22  # of the table, whose size only decides where rows lie
CACHE_BYTES = 128 << 20  # of weights that are used in turn
GPU = torch.device("cuda")
ROPE = RopeSpec(64, 160000.0, 16.0, 32.0, 1.0, 65536)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=GPU, dtype=torch.bfloat16)


def plain(*shape: int) -> Weight:
    return Weight(normal(*shape) * shape[-1] ** -0.5)


def numbers(*shape: int) -> Weight:
    return Weight(torch.randn(*shape, device=GPU))


def exponents(*shape: int, base: int = 119) -> Tensor:
    return (torch.randint(0, 2, shape, device=GPU) + base).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8(rows: int, columns: int) -> Weight:
    """e4m3 with tiles of 32 x 32, about 1 / sqrt(columns) large."""
    base = 127 - 6 - round(columns.bit_length() / 2)
    values = (normal(rows, columns) * 64).to(torch.float8_e4m3fn)
    return Weight(values, exponents(-(-rows // 32), columns // 32, base=base))


def fp4(experts: int, rows: int, columns: int) -> Weight:
    codes = torch.randint(0, 256, (experts, rows, columns // 2), device=GPU, dtype=torch.uint8).view(torch.int8)
    return Weight(codes, exponents(experts, rows, columns // 32, base=127 - 1 - round(columns.bit_length() / 2)))


def norm(width: int) -> NormWeights:
    return NormWeights(Weight(1 + 0.1 * normal(width)), 1e-20)


def attention_weights() -> AttentionWeights:
    return AttentionWeights(
        fp8(RANK, HIDDEN), norm(RANK), fp8(HEADS * DIM, RANK), fp8(DIM, HIDDEN), norm(DIM), numbers(HEADS),
        fp8(GROUPS * OUT_RANK, HEADS * DIM // GROUPS), fp8(HIDDEN, GROUPS * OUT_RANK), HEADS, GROUPS, 128, ROPE,
    )  # fmt: skip


def make_batch(tokens: int, context: int) -> TokenBatch:
    """Rows of up to four tokens that end requests of about this length; blocks shuffled over the pool."""
    per_row = -(-tokens // min(256, max(1, tokens // 4)))
    rows = -(-tokens // per_row)
    row = torch.arange(rows, dtype=torch.int32, device=GPU)
    counts = torch.full_like(row, per_row)
    counts[-1] = tokens - per_row * (rows - 1)
    starts = context - per_row - row % 128
    offsets = torch.cat([torch.zeros_like(row[:1]), counts.cumsum(0).int()])
    owner = row.repeat_interleave(counts, output_size=tokens)
    columns = -(-context // BLOCK)
    table = 1 + torch.randperm(rows * columns, device=GPU).int().view(rows, columns)
    positions = starts[owner] + torch.arange(tokens, device=GPU).int() - offsets[owner]
    return TokenBatch(positions, owner, offsets, starts, row + 1, table, torch.zeros_like(row), BLOCK, context - 1)


@dataclass
class Case:
    """One op: how to call it, what it must move and multiply, and with what the check compares.

    call, reference: prepared weights -> result. Bytes and products are those of `tokens` tokens.
    """

    name: str
    tokens: int
    prepared: list[Any]
    call: Callable[[Any], Any]
    num_bytes: float
    fp8: float = 0.0
    bf16: float = 0.0
    error: str = ""

    @property
    def floor(self) -> float:
        """Seconds."""
        return max(self.num_bytes / BYTES_PER_S, self.fp8 / FP8_PER_S + self.bf16 / BF16_PER_S)


def in_turn(prepared: Any, num_bytes: float) -> list[Any]:
    """As many copies of prepared weights as do not fit the L2 cache together."""
    count = max(1, min(16, round(CACHE_BYTES / max(1.0, num_bytes))))
    return [prepared, *(copy.deepcopy(prepared) for _ in range(count - 1))]


def seconds(case: Case, repeats: int = 15) -> float:
    """Median time of a call, by replays of a graph that holds enough of them."""
    calls = max(len(case.prepared), 4)
    for prepared in case.prepared:
        case.call(prepared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            case.call(case.prepared[number % len(case.prepared)])
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[2:])


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Mix):
        return [value.pre, value.post, value.comb]
    if isinstance(value, Selection):
        return [value.entries] + ([] if value.candidates is None else [value.candidates])
    if isinstance(value, Tensor):
        return [value]
    return [part for item in value or () for part in tensors(item)]


def difference(actual: Any, expected: Any) -> str:
    """Worst relative difference of a row of floats; share of equal numbers, or of equal choices in the worst row."""
    found = []
    for ours, theirs in zip(tensors(actual), tensors(expected), strict=True):
        if not theirs.is_floating_point() and theirs.ndim == 2 and theirs.shape[1] > 16:  # chosen ones, in order
            pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
            found.append(f"{min(len(set(a) & set(b)) / len(set(b)) for a, b in pairs):.4f}=")
        elif theirs.is_floating_point():
            a, b = ours.double().flatten(1), theirs.double().flatten(1)
            found.append(f"{float(((a - b).norm(dim=1) / b.norm(dim=1)).max()):.1e}")
        else:
            found.append(f"{float((ours == theirs).float().mean()):.4f}=")
    return " ".join(found)


class Bench:
    """The cases of one layer at the released sizes; `compares`: with the reference, on few tokens."""

    def __init__(self, context: int, only: list[str], compares: bool = True) -> None:
        self.context, self.only, self.compares = context, only, compares
        self.ours: Ops = build({"reference": reference_ops("fast"), "hopper": hopper_ops()})
        self.reference: Ops = build({"reference": reference_ops("exact")})
        self.weights: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        return not self.only or any(name.startswith(part) for part in self.only)

    def prepared(self, prepare: str, make: Callable[[], tuple[Any, ...]], num_bytes: float) -> tuple[list[Any], Any]:
        """Copies for the kernels, and the weights as they came."""
        if prepare not in self.weights:
            given = make()
            self.weights[prepare] = in_turn(getattr(self.ours, prepare)(*given), num_bytes), given
        return self.weights[prepare]

    def check(self, op: str, prepare: str, arguments: list[Any]) -> str:
        """The op on few tokens against the reference."""
        if not self.compares:
            return ""
        ours, given = self.weights[prepare]
        theirs = getattr(self.reference, prepare)(*given)
        wide = [
            value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value
            for value in arguments
        ]
        actual, expected = getattr(self.ours, op)(*arguments, ours[0]), getattr(self.reference, op)(*wide, theirs)
        if isinstance(actual, Attended):
            actual, expected = actual.heads(), in_panels(expected.bfloat16()).heads()
        return difference(actual, expected)

    def cases(self, tokens: int) -> list[Case]:
        makers = (
            self.hyper,
            self.projections,
            self.attention,
            self.compressor,
            self.indexer,
            self.moe,
            self.engram,
            self.head,
        )
        found: list[Case] = []
        for maker in makers:
            found += maker(tokens)
        return found

    def hyper(self, t: int) -> list[Case]:
        if not self.wants("hyper"):
            return []
        width, mixes = STREAMS * HIDDEN, (2 + STREAMS) * STREAMS
        hyper = HyperWeights(
            Weight(torch.randn(mixes, width, device=GPU) * width**-0.5), numbers(mixes), numbers(3), 20, 1e-6, 1e-20
        )
        weights, _ = self.prepared("prepare_hyper", lambda: (hyper, norm(HIDDEN)), mixes * width * 4)
        streams, pre = normal(t, STREAMS, HIDDEN), torch.rand(t, STREAMS, device=GPU)
        output, mix = self.ours.hyper_enter(streams, pre, weights[0])
        enter = Case("hyper_enter", t, weights, lambda w: self.ours.hyper_enter(streams, pre, w), t * HIDDEN * 2 * 5)
        enter.error = self.check("hyper_enter", "prepare_hyper", [streams[:8], pre[:8]])
        leave = Case(
            "hyper_leave", t, [None], lambda w: self.ours.hyper_leave(streams, output, mix), t * HIDDEN * 2 * 9
        )
        if self.compares:
            expected = self.reference.hyper_leave(streams.float(), output.float(), mix)
            leave.error = difference(self.ours.hyper_leave(streams, output, mix), expected)
        following = Case(
            "hyper_next", t, weights, lambda w: self.ours.hyper_next(streams, output, mix, w), t * HIDDEN * 2 * 10
        )
        following.error = self.check(
            "hyper_next", "prepare_hyper", [streams[:8], output[:8], Mix(mix.pre[:8], mix.post[:8], mix.comb[:8])]
        )
        return [enter, leave, following]

    def projections(self, t: int) -> list[Case]:
        if not self.wants("attention_inputs") and not self.wants("project_out"):
            return []
        size = 126e6
        weights, _ = self.prepared("prepare_attention", lambda: (attention_weights(),), size)
        x, attended = normal(t, HIDDEN), in_panels(normal(t, HEADS, DIM))
        positions = torch.arange(t, device=GPU, dtype=torch.int32) * 37 % 131072
        rows = RANK * HIDDEN + DIM * HIDDEN + HEADS * DIM * RANK
        inputs = Case(
            "attention_inputs", t, weights, lambda w: self.ours.attention_inputs(x, positions, w),
            rows + t * 2 * (HIDDEN + HEADS * DIM), fp8=2.0 * t * rows,
        )  # fmt: skip
        inputs.error = self.check("attention_inputs", "prepare_attention", [x[:8], positions[:8]])
        first, second = OUT_RANK * HEADS * DIM, HIDDEN * GROUPS * OUT_RANK
        out = Case(
            "project_out", t, weights, lambda w: self.ours.project_out(attended, w),
            first + second + t * (2 * HIDDEN + HEADS * DIM), fp8=2.0 * t * (first + second),
        )  # fmt: skip
        out.error = self.check("project_out", "prepare_attention", [attended.heads()[:8]])
        return [inputs, out]

    def attention(self, t: int) -> list[Case]:
        if not self.wants("attend"):
            return []
        batch = make_batch(t, self.context)
        weights, _ = self.prepared("prepare_attention", lambda: (attention_weights(),), 126e6)
        pages = latent_pages(int(batch.block_table.max()) + 1, BLOCK, DIM)
        ring = window_rows((len(batch.row_slots) + 1) * 132).view(-1, 132, DIM // 32 * 33)
        q, rows = normal(t, HEADS, DIM), window_rows(t)
        entries = torch.rand(t, self.context // 64, device=GPU).topk(TOP_K).indices.int() * 63
        entries = entries.sort(-1).values
        case = Case(
            "attend", t, weights[:1], lambda w: self.ours.attend(q, rows, batch, ring, pages, entries, w),
            t * (HEADS * DIM * 3 + TOP_K * 288 + 128 * 528), bf16=4.0 * t * HEADS * DIM * (TOP_K + 128),
        )  # fmt: skip
        few = make_batch(8, self.context)
        few.block_table.clamp_(max=len(pages) - 1)
        arguments = [q[:8], rows[:8], few, ring, pages, entries[:8]]
        case.error = self.check("attend", "prepare_attention", arguments)
        return [case]

    def compressor(self, t: int) -> list[Case]:
        if not self.wants("compress"):
            return []
        batch = make_batch(t, self.context)
        compressor = CompressorWeights(
            plain(DIM, HIDDEN), plain(DIM, HIDDEN), norm(DIM), plain(INDEX_DIM, DIM), norm(INDEX_DIM), 2, ROPE
        )
        size = 2.0 * (2 * DIM * HIDDEN + INDEX_DIM * DIM)
        weights, given = self.prepared("prepare_compressor", lambda: (compressor,), size)
        blocks = int(batch.block_table.max()) + 1
        pages, index = latent_pages(blocks, BLOCK // 2, DIM), index_pages(blocks, BLOCK // 2)
        state, x = torch.randn(len(batch.row_slots) + 1, 2, 2, DIM, device=GPU), normal(t, HIDDEN)
        case = Case(
            "compress", t, weights, lambda w: self.ours.compress(x, batch, w, state, pages, index),
            size + t * (HIDDEN * 2 + 8 * DIM + 178), bf16=2.0 * t * (2 * DIM * HIDDEN + INDEX_DIM * DIM / 2),
        )  # fmt: skip
        if not self.compares:
            return [case]
        few = make_batch(8, self.context)
        few.block_table.clamp_(max=blocks - 1)
        copies = [[value.clone() for value in (state, pages, index)] for _ in range(2)]
        self.ours.compress(x[:8], few, weights[0], *copies[0])
        self.reference.compress(x[:8].float(), few, self.reference.prepare_compressor(*given), *copies[1])
        changed = copies[1][1] != pages
        case.error = f"{float((copies[0][1] == copies[1][1])[changed].float().mean()):.4f}="
        return [case]

    def indexer(self, t: int) -> list[Case]:
        if not self.wants("select"):
            return []
        batch = make_batch(t, self.context)
        indexer = IndexerWeights(
            fp8(INDEX_HEADS * INDEX_DIM, RANK), plain(INDEX_HEADS, HIDDEN), INDEX_HEADS, TOP_K, 1, ROPE, True, 2048, 8
        )
        later = replace(indexer, keeps_candidates=False)
        x, low, pages = normal(t, HIDDEN), normal(t, RANK), index_pages(int(batch.block_table.max()) + 1, BLOCK)
        rows = len(batch.row_slots)
        keys = float(rows * self.context * 68)
        products = 2.0 * t * self.context * INDEX_HEADS * INDEX_DIM
        first, second = self.ours.prepare_indexer(indexer), self.ours.prepare_indexer(later)
        known = self.ours.select(x, low, batch, first, pages, None)
        assert known.candidates is not None
        whole = Case(
            "select, source", t, [first], lambda w: self.ours.select(x, low, batch, w, pages, None),
            keys + 8.0 * t * self.context, fp8=products,
        )  # fmt: skip
        some = Case(
            "select, candidates", t, [second], lambda w: self.ours.select(x, low, batch, w, pages, known.candidates),
            rows * 16384.0 * 68 + 8.0 * t * 16384, fp8=products * 16384 / self.context,
        )  # fmt: skip
        if not self.compares:
            return [whole, some]
        few = make_batch(8, self.context)
        few.block_table.clamp_(max=len(pages) - 1)
        exact = replace(Numerics.of("exact"), index_scores=False)  # scores in float32
        arguments = x[:8].float(), low[:8].float(), few
        mine = self.ours.select(x[:8], low[:8], few, first, pages, None)
        theirs = reference.select(exact, *arguments, reference.prepare_indexer(exact, indexer), pages, None)
        whole.error = difference(mine, theirs)
        mine = self.ours.select(x[:8], low[:8], few, second, pages, theirs.candidates)
        theirs = reference.select(exact, *arguments, reference.prepare_indexer(exact, later), pages, theirs.candidates)
        some.error = difference(mine.entries, theirs.entries)
        return [whole, some]

    def moe(self, t: int) -> list[Case]:
        if not any(self.wants(name) for name in ("route", "experts", "shared_expert", "run_experts")):
            return []
        x = normal(t, HIDDEN)
        router = RouterWeights(plain(384, HIDDEN), numbers(384), numbers(384), ACTIVE, "sqrtsoftplus", True, 1.5, 1.0)
        routers, _ = self.prepared("prepare_router", lambda: (router,), 384 * HIDDEN * 2)
        chosen, share = self.ours.route(x, None, routers[0])
        local = chosen % EXPERTS
        stack = ExpertWeights(
            fp4(EXPERTS, INNER, HIDDEN), fp4(EXPERTS, HIDDEN, INNER), fp4(EXPERTS, INNER, HIDDEN), 10.0
        )
        size = 3 * EXPERTS * HIDDEN * INNER * 17 / 32
        routed, _ = self.prepared("prepare_experts", lambda: (stack,), size)
        one = ExpertWeights(fp8(INNER, HIDDEN), fp8(HIDDEN, INNER), fp8(INNER, HIDDEN), 10.0)
        shared, _ = self.prepared("prepare_shared_expert", lambda: (one,), 3 * HIDDEN * INNER)
        added = torch.randn(t, HIDDEN, device=GPU)
        cases = [
            Case("route", t, routers, lambda w: self.ours.route(x, None, w), 384 * HIDDEN * 2 + t * HIDDEN * 2,
                 bf16=2.0 * t * 384 * HIDDEN),
            Case("experts", t, routed, lambda w: self.ours.experts(x, local, share, w),
                 size + t * HIDDEN * 6, fp8=2.0 * t * ACTIVE * 3 * HIDDEN * INNER),
            Case("shared_expert", t, shared, lambda w: self.ours.shared_expert(x, added, w),
                 3 * HIDDEN * INNER + t * HIDDEN * 8, fp8=2.0 * t * 3 * HIDDEN * INNER),
            Case("run_experts", t, list(zip(routed, shared, strict=False)),
                 lambda w: self.ours.run_experts(x, local, share, *w),
                 size + 3 * HIDDEN * INNER + t * HIDDEN * 4, fp8=2.0 * t * (ACTIVE + 1) * 3 * HIDDEN * INNER),
        ]  # fmt: skip
        cases[0].error = self.check("route", "prepare_router", [x[:8], None])
        cases[1].error = self.check("experts", "prepare_experts", [x[:8], local[:8], share[:8]])
        cases[2].error = self.check("shared_expert", "prepare_shared_expert", [x[:8], added[:8]])
        return [case for case in cases if self.wants(case.name)]

    def engram(self, t: int) -> list[Case]:
        if not self.wants("engram"):
            return []
        columns, width, rows = 24, 256, ENGRAM_ROWS
        table = Weight(
            torch.randn(rows, width, device=GPU, dtype=torch.bfloat16).to(torch.float8_e4m3fn),
            exponents(rows, width // 32, base=126),
        )
        made = EngramWeights(
            table, fp8((STREAMS + 1) * HIDDEN, columns * width), plain(STREAMS, HIDDEN), plain(STREAMS, HIDDEN), 1e-20
        )
        size = float((STREAMS + 1) * HIDDEN * columns * width)
        weights, _ = self.prepared("prepare_engram", lambda: (made,), CACHE_BYTES)
        streams, chosen = normal(t, STREAMS, HIDDEN), torch.randint(0, rows, (t, columns), device=GPU)
        case = Case(
            "engram", t, weights, lambda w: self.ours.engram(streams, chosen, None, w),
            size + t * (2 * STREAMS * HIDDEN * 2 + columns * 264), fp8=2.0 * t * size,
        )  # fmt: skip
        case.error = self.check("engram", "prepare_engram", [streams[:8], chosen[:8], None])
        return [case]

    def head(self, t: int) -> list[Case]:
        t = min(t, 1024)
        if not self.wants("head"):
            return []
        weights, _ = self.prepared("prepare_head", lambda: (HeadWeights(norm(HIDDEN), plain(VOCAB, HIDDEN)),), 1.3e9)
        streams, pre = normal(t, STREAMS, HIDDEN), torch.rand(t, STREAMS, device=GPU)
        case = Case(
            "head", t, weights, lambda w: self.ours.head(streams, pre, w),
            2.0 * VOCAB * HIDDEN + t * (STREAMS * HIDDEN * 2 + VOCAB * 4), bf16=2.0 * t * VOCAB * HIDDEN,
        )  # fmt: skip
        case.error = self.check("head", "prepare_head", [streams[:8], pre[:8]])
        return [case]


def in_panels(heads: Tensor) -> AttendedPanels:
    """Attended heads [T, h, D] bf16, rounded."""
    width = HEADS * DIM // GROUPS
    return AttendedPanels(group_panels(heads.view(-1, GROUPS, width), width), GROUPS, HEADS, DIM)


def latent_pages(blocks: int, per_block: int, dim: int) -> Tensor:
    """Random e2m1 codes with e4m3 scales between 0.25 and 2."""
    pages = torch.randint(0, 256, (blocks, per_block, dim // 16 * 9), device=GPU, dtype=torch.uint8)
    pages[..., dim // 2 :] = pages[..., dim // 2 :] % 24 + 0x28
    return pages


def index_pages(blocks: int, per_block: int) -> Tensor:
    pages = torch.randint(0, 256, (blocks, per_block, INDEX_DIM // 32 * 17), device=GPU, dtype=torch.uint8)
    pages[..., INDEX_DIM // 2 :] = pages[..., INDEX_DIM // 2 :] % 4 + 124
    return pages


def window_rows(rows: int) -> Tensor:
    made = torch.empty(rows, DIM // 32 * 33, device=GPU, dtype=torch.uint8)
    made[:, :DIM] = (normal(rows, DIM) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    made[:, DIM:] = torch.randint(120, 123, (rows, DIM // 32), device=GPU, dtype=torch.uint8)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8,32,1024,4096")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--only", default="", help="op names, or how they begin, with commas")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.context, [part for part in args.only.split(",") if part])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, context {args.context}")
    print(f"{'op':<20}{'tokens':>7}{'us':>10}{'floor us':>10}{'share':>7}   difference")
    for tokens in map(int, args.tokens.split(",")):
        for case in bench.cases(tokens):
            taken = seconds(case)
            print(
                f"{case.name:<20}{case.tokens:>7}{taken * 1e6:>10.1f}{case.floor * 1e6:>10.1f}"
                f"{case.floor / taken:>7.0%}   {case.error}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
