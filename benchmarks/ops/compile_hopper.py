"""Compile every Hopper kernel at the released sizes, on any machine: registers, spills and shared memory of each.

    PYTHONPATH=src python benchmarks/ops/compile_hopper.py [--capability 90] [--tokens 32,128]

No card is needed: where an op would launch a kernel, the kernel is compiled with the launch's arguments and not run.
Capability 100 says whether the kernels compile for Blackwell, and nothing of how they would do there; the kernels in
CUDA C++ use matrix instructions that only Hopper has and are compiled for 90, where NVRTC (of a CUDA build of torch,
or of the package nvidia-cuda-nvrtc) is found.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hopper as sizes
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer.backends.cuda import native
from deepinfer.backends.cuda.hopper import (
    attention,
    hyper,
    index_scores,
    large_products,
    matrices,
    moe,
    products,
    selection,
)
from deepinfer.ops.table import Ops
from deepinfer.ops.weights import DraftWeights, HeadWeights, NgramSpec

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.float64: "fp64", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
RESERVED = 1024  # bytes of shared memory that the system takes of each block


class Compiler:
    """Stands in for a kernel's launch; keeps one line per kernel and variant."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.seen: dict[tuple[Any, ...], str] = {}

    def run(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Compile with the types and constants of a launch."""
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{TYPES[value.dtype]}"
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        key = (
            kernel.__name__,
            *map(str, signature.values()),
            *map(str, constants.values()),
            *map(str, options.values()),
        )
        if key not in self.seen:
            source = ASTSource(kernel, signature, constants, attributes)
            self.seen[key] = self.compile(source, options)
            tile = ", ".join(f"{name} {value}" for name, value in constants.items() if "TILE" in name or "KEYS" in name)
            print(f"{kernel.__name__:<22}{self.seen[key]}   {tile}", flush=True)

    def compile(self, source: ASTSource, options: dict[str, Any]) -> str:
        """What is printed of the kernel."""
        compiled = triton.compile(source, target=self.target, options=options)
        [(_, used)] = resources(compiled.asm["cubin"], compiled.metadata.shared)
        return used

    @contextlib.contextmanager
    def instead_of_launches(self) -> Iterator[None]:
        """Kernels are given to `run` for as long as the context lasts."""
        with (
            mock.patch.object(JITFunction, "run", lambda kernel, *given, **kwargs: self.run(kernel, *given, **kwargs)),
            mock.patch.object(large_products, "num_multiprocessors", lambda device: 132),
        ):
            yield


def released_cases(tokens: int) -> None:
    """Call every op at the sizes of `hopper.py`, once for each of its cases; then those around layers and of drafts."""
    bench = sizes.Bench(32768, [], compares=False)
    for case in bench.cases(tokens):
        case.call(case.prepared[0])
    around_layers(bench.ours, tokens)


def around_layers(ops: Ops, tokens: int) -> None:
    """Call every op of embedding, n-grams, rings, drafts and choices."""
    vocab, hidden, streams, rank, taps = sizes.VOCAB, sizes.HIDDEN, sizes.STREAMS, 256, 3
    batch, ids = sizes.make_batch(tokens, 32768), torch.zeros(tokens, dtype=torch.int64, device=sizes.GPU)
    num_slots = len(batch.row_slots) + 1
    ops.embed(ids, ops.prepare_embedding(sizes.plain(vocab, hidden), streams))
    spec = NgramSpec(ids.new_zeros(vocab), 2, ((1, 3, 5, 7),) * 2, (((7,) * 8,) * 3,) * 2, -1)
    ring = torch.zeros(num_slots, 8, dtype=torch.int32, device=sizes.GPU)
    ops.ngram_rows(ids, batch, ring, ops.prepare_ngrams(spec))
    ops.store_tokens(ids, batch, ring)
    rows = sizes.window_rows(tokens)
    selection.group_peaks(torch.empty(tokens, 32768, device=sizes.GPU), batch.positions)  # of entries beyond 131,072
    ops.store_window(rows, batch, sizes.window_rows(num_slots * 132).view(num_slots, 132, -1))

    head = ops.prepare_head(HeadWeights(sizes.norm(hidden), sizes.plain(vocab, hidden)))
    parts = sizes.plain(vocab, rank), sizes.plain(vocab, rank), sizes.plain(1, hidden + rank)
    draft = ops.prepare_draft(
        DraftWeights(sizes.fp8(hidden, taps * hidden), sizes.norm(hidden), sizes.norm(hidden), *parts), head
    )
    values, pre = sizes.normal(tokens, streams, hidden), torch.ones(tokens, streams, device=sizes.GPU)
    ops.draft_main(torch.stack([ops.tap(values)] * taps, 1), draft)
    ops.main_rows(sizes.normal(tokens, hidden), batch.positions, ops.prepare_attention(sizes.attention_weights()))
    x, logits = ops.draft_head(values, pre, draft)
    ops.draft_next(logits, x, ids, draft)
    ops.draft_likeliest(logits, x, ids, draft)
    logits = ops.head(values, pre, head)
    ops.best_tokens(logits)
    x, rows = sizes.normal(tokens, hidden), sizes.normal(large_products.ROW_TILE, hidden)  # a head has more rows
    large_products.large_products(x, rows, torch.empty(tokens, len(rows), device=sizes.GPU))
    ops.draw(logits, pre[:, 0].contiguous(), ids, ids)


@contextlib.contextmanager
def packed() -> Iterator[None]:
    """Matrices are packed as on a card, for products in CUDA C++, which are compiled apart and left out here."""
    with contextlib.ExitStack() as patches:
        for module in (matrices, moe):
            patches.enter_context(mock.patch.object(module, "can_pack", lambda *given: True))
        for name, value in (("kernel_for", mock.Mock()), ("widening_for", mock.Mock()), ("num_multiprocessors", 132)):
            patches.enter_context(mock.patch.object(products, name, mock.Mock(return_value=value)))
        yield


def resources(cubin: bytes, dynamic: int) -> list[tuple[str, str]]:
    """Each kernel's name, and registers of a thread, bytes spilled to its stack, bytes of shared memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    used = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return [
        (name, f"{registers:>6}{stack:>8}{int(shared) - RESERVED + dynamic:>9}")
        for name, registers, stack, shared in used
    ]


def compile_native() -> None:
    """The kernels in CUDA C++."""
    sources = [(attention.WIDE_SOURCE, attention.WIDE_SHARED_BYTES), (attention.PLACES_SOURCE, 0)]
    sources += [(index_scores.NATIVE, 0), (selection.NATIVE, 0)]
    sources += [(form.source, products.SHARED_BYTES) for form in (products.MANY, products.FEW)]
    sources += [(hyper.NATIVE, hyper.NATIVE_SHARED_BYTES)]
    for source, dynamic in sources:
        try:
            cubin = native.compile_source(source, "sm_90a")
        except native.BuildError as error:
            print(f"CUDA C++ left out: {error}")
            return
        for name, used in resources(cubin, dynamic):
            print(f"{name:<22}{used}   CUDA C++")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--tokens", default="32,128")
    args = parser.parse_args()
    sizes.GPU, sizes.CACHE_BYTES = torch.device("cpu"), 1
    sizes.VOCAB, sizes.EXPERTS, sizes.ENGRAM_ROWS = 1024, 2, 1024  # numbers that no kernel is compiled for
    print(f"sm_{args.capability}, triton {triton.__version__}\n{'kernel':<22}{'regs':>6}{'spilled':>8}{'shared':>9}")
    if args.capability == 90:
        compile_native()
    with Compiler(args.capability).instead_of_launches():
        for tokens in map(int, args.tokens.split(",")):
            released_cases(tokens)
            with packed():
                released_cases(tokens)


if __name__ == "__main__":
    main()
