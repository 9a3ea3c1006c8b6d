"""Whether a Triton kernel for Hopper overwrites a tile that the matrix unit still reads: on any machine, none is run.

    PYTHONPATH=src python benchmarks/ops/hopper_buffers.py [kernels.py]

Every kernel of the backend is compiled to TTGIR (the last form in which buffers, copies and products have names) with
the arguments of its launches at the released sizes and at small ones, where tiles are masked. A loop there issues
products (`warp_group_dot`), says how many of them may be unfinished (`warp_group_dot_wait {pendings = N}`) and copies
tiles for later turns into buffers that take turns too. It is gone through in the order of its ops, and no product is
finished before a wait says so. A write into a buffer that such a product reads is printed, and the exit status is 1.
Barriers between warps are not looked for: a later pass puts one between any read of a buffer and a write to it.

A file given instead is imported, and its `launch` is called in place of the backend's ops.
"""

from __future__ import annotations

import argparse
import operator
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hopper as sizes
import torch
from compile_hopper import Compiler, released_cases
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TURNS = 9  # of each loop, more than twice as many as any tile has buffers
SMALL = {
    "HIDDEN": 96, "HEADS": 4, "DIM": 64, "RANK": 96, "GROUPS": 2, "OUT_RANK": 32, "INNER": 96, "TOP_K": 16,
    "INDEX_HEADS": 4, "INDEX_DIM": 32, "VOCAB": 200,
}  # fmt: skip
Buffer = tuple[str, int | None]  # the allocation, and which of its buffers; None: it may be any
Value = int | Buffer | None
SCALARS: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "cmpi sge": operator.ge, "cmpi sgt": operator.gt,
    "cmpi slt": operator.lt, "cmpi sle": operator.le, "cmpi eq": operator.eq, "cmpi ne": operator.ne,
}  # fmt: skip


@dataclass
class Op:
    """A line of TTGIR and what stands inside it: one region of a loop, two of a condition."""

    result: str
    text: str
    regions: list[list[Op]] = field(default_factory=list)


def parse(ttgir: str) -> list[Op]:
    """The ops of a module printed without debug information."""
    top: list[Op] = []
    opened, regions = [Op("", "")], [top]
    for line in map(str.strip, ttgir.splitlines()):
        if line.startswith("}"):
            regions.pop()
            op = opened.pop()
        else:
            result, text = re.fullmatch(r"(?:(%\S+?)(?::\d+)? = )?(.*)", line).groups()  # type: ignore[union-attr]
            op = Op(result or "", text)
            regions[-1].append(op)
        if line.endswith("{"):
            op.regions.append([])
            opened.append(op)
            regions.append(op.regions[-1])
    return top


class Order:
    """Goes through ops in their order; knows some scalars, all buffers, and the products that may be unfinished."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.unfinished: list[list[Buffer]] = []  # what each reads, oldest first
        self.found: list[str] = []

    def run(self, ops: list[Op]) -> list[Value]:
        """The values that the ops yield at their end."""
        yielded: list[Value] = []
        for op in ops:
            if op.text.startswith("scf.yield"):
                yielded = self.read(op.text)
            elif op.text.startswith("scf.for"):
                self.set(op.result, self.loop(op))
            elif op.text.startswith("scf.if"):
                self.set(op.result, self.condition(op))
            else:
                for region in op.regions:
                    self.run(region)
                self.set(op.result, self.step(op))
        return yielded

    def read(self, text: str) -> list[Value]:
        names = re.findall(r"%[\w.-]+(?:#\d+)?", text.partition(" : ")[0])
        return [self.values.get(name) for name in names]

    def set(self, result: str, values: list[Value]) -> None:
        self.values |= {f"{result}#{number}": value for number, value in enumerate(values)}
        self.values[result] = values[0] if values else None

    def loop(self, op: Op) -> list[Value]:
        head, _, carried = op.text.partition(" iter_args(")
        index = re.search(r"%[\w.-]+", head)[0]  # type: ignore[index]
        start, end, step = self.read(head)[-3:]
        pairs = re.findall(r"(%[\w.-]+) = (%[\w.-]+(?:#\d+)?)", carried.partition(") -> ")[0])
        values = [self.values.get(outer) for _, outer in pairs]
        known = [value for value in (start, end, step) if isinstance(value, int)]
        turns = min(TURNS, len(range(*known))) if len(known) == 3 else TURNS
        for turn in range(turns):
            self.values |= dict(zip((inner for inner, _ in pairs), values, strict=True))
            self.values[index] = known[0] + turn * known[2] if len(known) == 3 else None
            values = self.run(op.regions[0])
        return values

    def condition(self, op: Op) -> list[Value]:
        """Both ways where it is not known which; what either leaves unfinished may be so."""
        [chosen] = self.read(op.text)[:1]
        before, left, results = list(self.unfinished), [], []
        for region in [op.regions[0], *op.regions[1:]] if chosen is None else op.regions[1 - int(bool(chosen)) :][:1]:
            self.unfinished = list(before)
            results.append(self.run(region))
            left.append(self.unfinished)
        if chosen is None and len(op.regions) == 1:
            left.append(before)
        self.unfinished = max(left, key=len, default=before)
        return [values[0] if len(set(values)) == 1 else None for values in zip(*results, strict=True)]

    def step(self, op: Op) -> list[Value]:
        name, _, rest = op.text.partition(" ")
        inputs = self.read(rest)
        dialect, _, kind = name.partition(".")
        if dialect == "arith":
            return [self.scalar(kind, rest, inputs)]
        if kind == "local_alloc":
            if inputs:  # it holds these values at once
                self.write((op.result, 0), op)
            return [(op.result, 0 if inputs else None)]
        if kind == "memdesc_index":
            [base, number] = inputs
            return [(base[0], number if isinstance(number, int) else None)] if isinstance(base, tuple) else [None]
        if kind.startswith("memdesc_"):
            return inputs[:1]
        if kind == "warp_group_dot":
            reads = [value for value in inputs if isinstance(value, tuple)]
            if len(reads) != rest.partition(" -> ")[0].count("!ttg.memdesc"):
                self.found.append(f"what {op.result} reads is not known")
            self.unfinished.append(reads)
            if "isAsync = true" not in rest:
                self.unfinished.clear()
        elif kind == "warp_group_dot_wait":
            pendings = int(re.search(r"pendings = (\d+)", rest)[1])  # type: ignore[index]
            del self.unfinished[: max(0, len(self.unfinished) - pendings)]
            return inputs
        elif kind == "local_store" or kind.startswith("async_copy") or kind.startswith("async_tma_copy_global"):
            for target in inputs:
                if isinstance(target, tuple):
                    self.write(target, op)
        return []

    def scalar(self, kind: str, rest: str, inputs: list[Value]) -> Value:
        if kind == "constant":
            number = re.match(r"-?\d+(?= :)", rest)
            return int(number[0]) if number else {"true": 1, "false": 0}.get(rest)
        if kind == "select":
            return None if inputs[0] is None else inputs[1 if inputs[0] else 2]
        words = f"{kind} {rest.partition(',')[0]}" if kind == "cmpi" else kind
        numbers = [value for value in inputs if isinstance(value, int)]
        return int(SCALARS[words](*numbers)) if words in SCALARS and len(numbers) == 2 else None

    def write(self, target: Buffer, op: Op) -> None:
        for reads in self.unfinished:
            for place, number in reads:
                if place == target[0] and (number is None or target[1] is None or number == target[1]):
                    self.found.append(f"{place} is written by `{op.text.partition(' ')[0]}` while a product reads it")


class NoData(TorchDispatchMode):
    """Numbers that ops read off tensors without data are 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


class Checker(Compiler):
    """Compiles launches to TTGIR and goes through it."""

    def __init__(self) -> None:
        super().__init__(90)
        self.num_found = 0

    def compile(self, source: ASTSource, options: dict[str, Any]) -> str:
        """What is wrong with the kernel."""
        text = ttgir_of(source, options, self.target)
        order = Order()
        order.run(parse(text))
        self.num_found += len(order.found)
        return f"{text.count('ttng.warp_group_dot '):>9}   {'; '.join(dict.fromkeys(order.found)) or '-'}"


def ttgir_of(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> str:
    """The first two stages of `triton.compile`."""
    backend, context = make_backend(target), ir.context()
    parsed = backend.parse_options(options | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, codegen, backend.get_module_map(), context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {"target": target, **parsed.__dict__})
    return str(module.str_nodebug())


def launch_all() -> None:
    """Every op with a kernel, at each shape that changes how one is compiled."""
    sizes.GPU = torch.device("meta")
    for tokens in (8, 32, 128, 1024):
        released_cases(tokens)
    for name, value in SMALL.items():
        setattr(sizes, name, value)
    released_cases(8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a file whose `launch` launches kernels; default: those of a layer")
    args, checker = parser.parse_args(), Checker()
    print(f"{'kernel':<22}{'products':>9}   writes")
    with checker.instead_of_launches(), NoData():
        (runpy.run_path(args.file)["launch"] if args.file else launch_all)()
    print(f"{len(checker.seen)} kernels and variants, {checker.num_found} writes into buffers in use")
    return int(checker.num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
