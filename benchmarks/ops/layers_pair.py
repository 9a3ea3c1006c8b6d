"""One step's native call in two checkouts, replayed in turns: how much faster the second one is.

    OMP_NUM_THREADS=1 python benchmarks/ops/layers_pair.py BEFORE AFTER [--threads 2] [--rows 1,4,8] [--rounds 48]

Each checkout is a process of its own that stops in a decode step of so many requests, and runs that step's model
again whenever it is its turn, so that a machine whose speed drifts meets both alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 128
RUNS = 40  # of one row in a turn; more rows take fewer


def replay(threads: int, rows: int) -> None:
    """Answer each line of standard input with the milliseconds of a turn; the end of it ends the process."""
    import numpy as np

    from deepinfer.backends.cpu.batch import BatchStruct
    from deepinfer.backends.cpu.layers import InputsStruct
    from deepinfer.backends.cpu.library import native
    from deepinfer.llm import LLM
    from deepinfer.sampling.params import SamplingParams

    library: Any = native()
    run_model = library.run_model

    def stop(model: int, step: int, *others: Any) -> int:
        batch = BatchStruct.from_address(InputsStruct.from_address(step).batch)
        if batch.num_tokens != rows or batch.num_rows != rows:
            return int(run_model(model, step, *others))
        print("ready", flush=True)
        for _ in sys.stdin:
            times = []
            for _ in range(max(1, RUNS // rows)):
                start = time.perf_counter()
                run_model(model, step, *others)
                times.append(1e3 * (time.perf_counter() - start))
            print(np.quantile(times, 0.25), flush=True)
        os._exit(0)

    with LLM(device="cpu", num_threads=threads, num_draft_tokens=0) as llm:
        library.run_model = stop
        prompts = np.random.default_rng(0).integers(10, 3900, (rows, PROMPT_TOKENS)).tolist()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=rows + 16, ignore_eos=True), progress=False)


def start(checkout: str, threads: int, rows: int) -> subprocess.Popen[str]:
    """A process of this checkout, in its step."""
    command = [sys.executable, __file__, checkout, checkout, "--threads", str(threads), "--replay", str(rows)]
    environment = {**os.environ, "PYTHONPATH": str(Path(checkout) / "src")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{checkout} came to no step of {rows} rows")
    return process


def turn(process: subprocess.Popen[str]) -> float:
    """Milliseconds of one turn."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--replay", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replay:
        return replay(args.threads, args.replay)
    for rows in (int(count) for count in args.rows.split(",")):
        both = [start(checkout, args.threads, rows) for checkout in (args.before, args.after)]
        turns = []
        for number in range(args.rounds):
            first = number % 2
            times = {which: turn(both[which]) for which in (first, 1 - first)}
            turns.append((times[0], times[1]))
        for process in both:
            process.communicate()
        ratios = statistics.quantiles([before / after for before, after in turns], n=10)
        before, after = (statistics.median(column) for column in zip(*turns, strict=True))
        spread = f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"{rows:3} rows: {before:.3f} and {after:.3f} ms, {ratios[4]:.3f} times as fast {spread}", flush=True)


if __name__ == "__main__":
    main()
