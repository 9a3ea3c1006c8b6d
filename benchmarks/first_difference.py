"""Which op first gives a token other bits in a batch than alone: all ops of prompt and decode steps, in their order.

    PYTHONPATH=src python benchmarks/first_difference.py [--device cuda] [--model FOLDER] [--sizes 1,7,64,256]
        [--drafts 0]

Requests of random tokens run through the model alone and among others, in other slots and blocks: a step of their
prompts, then decode steps of 1 token, of 4, and of 1 to 5, each of these also in the padded form that CUDA graphs have.
Compared with the request alone are the results of every call of an op, bit for bit, and what the slots and blocks hold
after each step; caches begin full of garbage. One line a batch, size 1 is each request alone again; the first
differences are told. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import deepinfer
from deepinfer.backends.select import load_ops
from deepinfer.config.engine import EngineConfig
from deepinfer.messages import StepPlan
from deepinfer.model.v41.model import BoundModel
from deepinfer.ops.table import OP_NAMES, WHOLES, Ops, one_by_one
from deepinfer.ops.values import Attended
from deepinfer.runner import build
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.graph_shapes import StepShape, padded_batch
from deepinfer.runner.runner import Runner

NANO = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"
WATCHED = 8  # requests of each batch that are compared
LONGEST = 200  # tokens of a prompt
OUTSIDE = {"read_tokens", "write_tokens", "read_table"}  # they are told of slots, and take no step's tokens
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
Call = tuple[str, list[Tensor]]


class Trace:
    """Results of all calls of ops since `calls` was emptied."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def around(self, ops: Ops) -> Ops:
        """The same ops, layers as calls of single ones, each of them noted."""
        traced = one_by_one(ops)
        for name in OP_NAMES:
            if not name.startswith("prepare") and name not in WHOLES and name not in OUTSIDE:
                setattr(traced, name, self._noted(name, getattr(traced, name)))
        return traced

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*values: Any) -> Any:
            result = function(*values)
            found = tensors(result)
            self.calls.append((name, [t.transpose(0, 1) for t in found] if name == "ngram_rows" else found))
            return result

        return noted


class Requests:
    """Random requests, each in a slot and blocks of a batch, over caches of their own."""

    def __init__(self, model: BoundModel, builder: BatchBuilder, trace: Trace, vocab_size: int) -> None:
        self.model, self.builder, self.trace, self.vocab_size = model, builder, trace, vocab_size
        self.pools = model.pools

    def tokens(self, number: int) -> tuple[int, np.ndarray]:
        """Length of a request's prompt, and tokens from its beginning on."""
        draw = np.random.default_rng(number)
        return int(draw.integers(1, LONGEST)), draw.integers(3, self.vocab_size, LONGEST + 32).astype(np.int32)

    def run(self, numbers: list[int], slots: list[int], step: int, *, is_padded: bool) -> dict[int, list[Call]]:
        """One step of these requests in these slots; for each the calls of ops, its tokens' share of their results.

        step: 0 = their prompts; 1, 2, 3 = decode steps.
        """
        parts, starts, counts = [], [], []
        for number in numbers:
            length, tokens = self.tokens(number)
            starts.append(0 if step == 0 else length + sum(count(number, before) for before in range(1, step)))
            counts.append(length if step == 0 else count(number, step))
            parts.append(tokens[starts[-1] : starts[-1] + counts[-1]])
        plan = self._plan(slots, np.array(starts), np.array(counts), parts, step)
        self.trace.calls = []
        if is_padded:
            shape = StepShape.of(plan, self.builder.block_tokens, self.builder.max_columns, feeds_draft=True)
            packed = np.zeros(shape.size, dtype=np.int32)
            shape.pack(plan, packed)
            batch = padded_batch(shape, torch.from_numpy(packed).to(self.builder.device), self.builder)
        else:
            batch = dataclasses.replace(self.builder.build(plan, feeds_draft=True), logit_tokens=None)
        self.model.compute(batch, batch.encoder.num_tokens)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        found = {}
        for row, number in enumerate(numbers[:WATCHED]):
            share = slice(int(offsets[row]), int(offsets[row + 1]))
            calls = [(name, [result[share].clone() for result in results]) for name, results in self.trace.calls]
            found[number] = [*calls, ("caches", self._caches(slots[row]))]
        self.trace.calls = []
        return found

    def _caches(self, slot: int) -> list[Tensor]:
        blocks = self.builder.block_table[slot, : -(-(LONGEST + 32) // self.builder.block_tokens)].long()
        return [self.pools.slots[slot][None].clone(), self.pools.blocks[blocks].clone()]

    def _plan(
        self, slots: list[int], starts: np.ndarray, counts: np.ndarray, tokens: list[np.ndarray], step: int
    ) -> StepPlan:
        """A step's plan; tokens of decode rows are put where the step reads them."""
        number, nothing = np.array(slots, dtype=np.int32), np.zeros(0, dtype=np.int32)
        yes, host = np.ones(len(slots), dtype=np.bool_), np.concatenate(tokens).astype(np.int32)
        is_prefill = yes & (step == 0)
        if step:
            positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)])
            ids = torch.from_numpy(host.astype(np.int64)).to(self.builder.device)
            self.builder.store(ids, np.repeat(number, counts), positions.astype(np.int32))
        return StepPlan(
            step, number, starts.astype(np.int32), counts.astype(np.int32), np.zeros_like(number), is_prefill, yes,
            ~yes, nothing if step else host, nothing, nothing, nothing,
        )  # fmt: skip

    def begin(self, order: np.random.Generator) -> None:
        """Caches full of garbage, blocks dealt anew."""
        for pool in (self.pools.blocks, self.pools.slots):
            pool[1:] = 0xFF  # NaN as e4m3, ue8m0 or float32, and token -1
        table = self.builder.block_table
        columns = -(-(LONGEST + 32) // self.builder.block_tokens)
        dealt = 1 + order.permutation((len(table) - 1) * columns).astype(np.int32)
        table[1:, :columns] = torch.from_numpy(dealt).view(-1, columns).to(table.device)


def count(number: int, step: int) -> int:
    """Tokens of a request in a decode step."""
    return (1, 4, 1 + number % 5)[step - 1]


def tensors(result: Any) -> list[Tensor]:
    """All tensors of an op's result, in order."""
    if isinstance(result, Attended):
        result = result.heads()
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    if dataclasses.is_dataclass(result):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [tensor for item in result for tensor in tensors(item)]


def first_difference(alone: list[Call], found: list[Call]) -> str | None:
    """The first call that gives other bits, and where."""
    if [name for name, _ in alone] != [name for name, _ in found]:
        return "other ops are called"
    for number, ((name, expected), (_, results)) in enumerate(zip(alone, found, strict=True)):
        for place, pair in enumerate(zip(expected, results, strict=True)):
            width = max(value.shape[-1] for value in pair)
            one, other = (
                F.pad(value, (0, width - value.shape[-1]), value=-1) if value.shape[-1] < width else value
                for value in pair
            )
            kind = INTEGERS[one.itemsize]
            differs = one.contiguous().view(kind) != other.contiguous().view(kind)
            if differs.any():
                at = tuple(differs.nonzero()[0].tolist())
                where = f"call {number}, {name}, value {place} at {list(at)}, {int(differs.sum())} of {differs.numel()}"
                return f"{where}: {one[at].item()} alone, {other[at].item()} here"
    return None


def make_requests(folder: Path, device: str, most: int, num_drafts: int | None) -> Requests:
    """An engine's model, with room for the largest batch."""
    trace, options = (
        Trace(),
        {"device": device, "max_num_requests": most, "num_blocks": 4 * most, "num_draft_tokens": num_drafts},
    )
    config = EngineConfig.from_options(options | {"draft_scheduling": False, "enforce_eager": True})
    with mock.patch.object(build, "load_ops", lambda options: trace.around(load_ops(options))):
        built = build.build_runner(config, folder)
    assert isinstance(built.runner, Runner) and isinstance(built.runner.model, BoundModel)
    return Requests(built.runner.model, built.runner.builder, trace, built.vocab_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--sizes", default="1,7,64,256")
    parser.add_argument(
        "--drafts", type=int, help="rings hold so many drafts more; as many as the head makes if not given"
    )
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    requests = make_requests(args.model, args.device, max(*sizes, 8), args.drafts)
    order, num_slots = np.random.default_rng(1), max(*sizes, WATCHED)
    alone: dict[int, list[list[Call]]] = {}
    for number in range(WATCHED):
        requests.begin(order)
        slot = int(order.integers(1, num_slots + 1))
        alone[number] = [requests.run([number], [slot], step, is_padded=False)[number] for step in range(4)]
    num_different = 0
    for size in sizes:
        batches = [list(range(size))] if size > 1 else [[number] for number in range(WATCHED)]
        for is_padded in (False, True):
            told: list[str] = []
            for batch in batches:
                requests.begin(order)
                slots = (1 + order.permutation(num_slots)[: len(batch)]).tolist()
                for step in range(4):
                    found = requests.run(batch, slots, step, is_padded=is_padded and step > 0)
                    for number, calls in found.items():
                        difference = first_difference(alone[number][step], calls)
                        if difference is not None:
                            told.append(f"  request {number}, step {step}: {difference}")
            num_different += len(told)
            form = "padded decode steps" if is_padded else "steps as they are"
            print(
                f"{args.model.name}, batch of {size}, {form}: {len(told)} steps of requests differ",
                *told[:4],
                sep="\n",
                flush=True,
            )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
