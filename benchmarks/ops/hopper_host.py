"""Time that the host needs for one call of each Hopper op up to its launches, which are left out; no card is needed.

    PYTHONPATH=src python benchmarks/ops/hopper_host.py [--tokens 64] [--repeat 200]

What is timed is Python and torch: checks of shapes, empty results, sizes of launches. Triton's and the driver's own
time for a launch comes on top. A prompt's step makes some 30 launches a layer, none of them in a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import hopper as sizes
import torch
from triton.runtime.jit import JITFunction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    launches = 0

    def count(kernel: JITFunction[Any], *given: Any, **options: Any) -> None:
        nonlocal launches
        launches += 1

    JITFunction.run = count
    sizes.GPU, sizes.CACHE_BYTES = torch.device("cpu"), 1
    sizes.EXPERTS, sizes.Bench.check = 2, lambda *given: ""
    bench = sizes.Bench(32768, [])
    print(f"{'op':<18}{'us':>8}{'launches':>10}")
    total = 0.0
    for maker in (bench.hyper, bench.projections, bench.attention, bench.compressor, bench.moe):
        for case in maker(args.tokens):
            case.call(case.prepared[0])
            launches, started = 0, time.perf_counter()
            for _ in range(args.repeat):
                case.call(case.prepared[0])
            spent = 1e6 * (time.perf_counter() - started) / args.repeat
            total += spent
            print(f"{case.name:<18}{spent:>8.1f}{launches // args.repeat:>10}", flush=True)
    print(f"{'sum':<18}{total:>8.1f}")


if __name__ == "__main__":
    main()
