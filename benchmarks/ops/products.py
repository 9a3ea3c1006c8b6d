"""Products of the native CPU ops by format and number of rows: billions of multiply-adds a second, best of many runs.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/ops/products.py [--threads 1] [--rows 1,2,4,6,8,16,64,256]

The shapes are those of the small model's layers. A call from Python, some 1.5 us, is part of each figure.
"""

from __future__ import annotations

import argparse
import time

import torch

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import prepare_matrix
from deepinfer.ops.weights import Weight

CASES = {  # format, rows, columns
    "mix": ("f32", 24, 1536),
    "router": ("bf16", 16, 384),
    "head": ("bf16", 4096, 384),
    "query": ("fp8", 1024, 128),
    "output": ("fp8", 384, 256),
    "expert, up": ("fp4", 256, 384),
    "expert, down": ("fp4", 384, 128),
}
RUNS = 300
RUN_PRODUCTS = 2_000_000  # multiply-adds of a run at least


def made(number_format: str, rows: int, columns: int) -> Weight:
    """A random matrix, every scale 2 ** -7."""
    if number_format in ("f32", "bf16"):
        values = torch.randn(rows, columns)
        return Weight(values.bfloat16() if number_format == "bf16" else values)
    tile = 32 if number_format == "fp8" else 1
    scale = torch.full((rows // tile, columns // 32), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    if number_format == "fp8":
        return Weight(torch.randn(rows, columns).to(torch.float8_e4m3fn), scale)
    return Weight(torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8), scale)


def rate(weight: Weight, num_rows: int) -> float:
    """Multiply-adds a second of the fastest run."""
    matrix = prepare_matrix(weight)
    x, out = torch.randn(num_rows, matrix.columns), torch.empty(num_rows, matrix.rows)
    multiply, work = native().multiply, num_rows * matrix.rows * matrix.columns
    repeats, best = max(1, RUN_PRODUCTS // work), 0.0
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(repeats):
            multiply(x.data_ptr(), num_rows, x.stride(0), matrix.address, out.data_ptr())
        best = max(best, repeats * work / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,6,8,16,64,256")
    args = parser.parse_args()
    native().set_num_threads(args.threads)
    torch.manual_seed(0)
    counts = [int(count) for count in args.rows.split(",")]
    print(f"{'':14}{'format':8}", *(f"{count:6}" for count in counts))
    for name, (number_format, rows, columns) in CASES.items():
        weight = made(number_format, rows, columns)
        figures = (f"{rate(weight, count) / 1e9:6.1f}" for count in counts)
        print(f"{name:14}{number_format:8}", *figures, flush=True)


if __name__ == "__main__":
    main()
