"""Compare deepinfer with fastllm and mlx-lm on this machine's CPU: same checkpoint, prompts and threads, greedy.

    PYTHONPATH=src python benchmarks/peers/compare.py FOLDER --ftllm PYTHON --mlx PYTHON [--mlx-blas libopenblas.so.0]
        [--engines deepinfer,ftllm,mlx] [--cases prefill-512,decode-16] [--runs 5] [--threads 2]
        [--launcher "nice -n -10"] [--max-others 0.15] [--log FILE]

FOLDER is what `make_checkpoint.py` wrote; PYTHON is the interpreter of a virtual environment that has the engine.
Every run is a process of its own, with a new prompt; the engines take turns, in reversed order every other time. A run
during which other processes used more than `--max-others` of the machine is repeated, up to nine times. Medians with
their range are printed, and the median of the paired ratios to deepinfer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from job import RESULT, Job

# Requests, prompt tokens, answer tokens, and the figure that is read.
CASES = {
    "prefill-512": (1, 512, 1, "prefill"),
    "prefill-2048": (1, 2048, 1, "prefill"),
    "decode-1": (1, 32, 65, "decode"),
    "decode-16": (16, 32, 33, "decode"),
}
COLUMNS = ("case", "engine", "tokens/s", "deepinfer / it", "cores", "peak MB", "first tokens equal", "others at most")
MAX_TRIES = 10
HERE = Path(__file__).parent


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """How each engine is started; the job comes after the runner's name."""
    blas = ["env", f"LD_PRELOAD={args.mlx_blas}"] if args.mlx_blas else []
    return {
        "deepinfer": [sys.executable, "run_deepinfer.py"],
        "ftllm": [args.ftllm, "run_ftllm.py", str(args.threads - 1)],
        "ftllm-all-workers": [args.ftllm, "run_ftllm.py", str(args.threads)],
        "mlx": [*blas, args.mlx, "run_mlx.py", "float32"],
        "mlx-as-shipped": [args.mlx, "run_mlx.py", "packed"],
    }


def run(command: list[str], job: Job, launcher: list[str], log: Path | None) -> dict:
    """The result line of one process."""
    at = next(place for place, word in enumerate(command) if word.startswith("run_"))
    words = [*launcher, *command[:at], str(HERE / command[at]), json.dumps(asdict(job)), *command[at + 1 :]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(f"{shlex.join(words)} printed no result:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = json.loads(lines[-1].removeprefix(RESULT))
    if log:
        with log.open("a") as file:
            print(json.dumps({"command": command, "job": asdict(job)} | result), file=file)
    return result


def logged(command: list[str], job: Job, log: Path | None) -> list[dict]:
    """Results of the same run in the log, so that a comparison that was stopped goes on where it was."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    return [line for line in map(json.loads, lines) if line["command"] == command and line["job"] == asdict(job)]


def quiet_run(attempt: Callable[[], dict], max_others: float, results: list[dict]) -> dict:
    """The first result taken on a quiet machine, or else the quietest one; `results` are earlier ones."""
    results = [result for result in results if result["others"] <= max_others][:1]
    while len(results) < MAX_TRIES and (not results or results[-1]["others"] > max_others):
        results.append(attempt())
    return min(results, key=lambda result: result["others"])


def measure_case(case: str, args: argparse.Namespace, done: dict[str, list[dict]], turn: int) -> None:
    """Let every engine take one turn at a case."""
    requests, prompt, answer, _ = CASES[case]
    job = Job(args.folder, args.threads, requests, prompt, answer, seed=turn)
    starts = commands(args)
    for engine in args.engines[:: -1 if turn % 2 else 1]:
        attempt = partial(run, starts[engine], job, args.launcher, args.log)
        result = quiet_run(attempt, args.max_others, logged(starts[engine], job, args.log))
        done[engine].append(result)
        figure = result[CASES[case][3]]
        print(f"{case} {engine}: {figure:.1f} tokens/s, others {result['others']:.0%}", file=sys.stderr, flush=True)


def line_of(case: str, engine: str, mine: list[dict], first: list[dict]) -> str:
    """A line of the table; `first` are the results of the engine that others are compared with."""
    figure = CASES[case][3]
    values = [result[figure] for result in mine]
    ratio = statistics.median(ours[figure] / theirs[figure] for ours, theirs in zip(first, mine, strict=True))
    equal = statistics.mean(
        ours[0] == theirs[0]
        for one, other in zip(first, mine, strict=True)
        for ours, theirs in zip(one["token_ids"], other["token_ids"], strict=True)
    )
    columns = [case, engine, f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})", f"{ratio:.1f}"]
    columns += [f"{statistics.median(result['cores'] for result in mine):.1f}"]
    columns += [f"{max(result['peak_mb'] for result in mine):.0f}", f"{equal:.0%}"]
    columns += [f"{max(result['others'] for result in mine):.0%}"]
    return "| " + " | ".join(columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--ftllm", default="python")
    parser.add_argument("--mlx", default="python")
    parser.add_argument("--mlx-blas", help="BLAS library to put before the reference one of mlx's wheel")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["deepinfer", "ftllm", "mlx"])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--launcher", type=shlex.split, default=[], help="words before every timed command")
    parser.add_argument("--max-others", type=float, default=0.15)
    parser.add_argument("--log", type=Path, help="every run, one JSON line each; what it holds is not run again")
    args = parser.parse_args()
    done: dict[str, dict[str, list[dict]]] = {case: {name: [] for name in args.engines} for case in args.cases}
    for turn in range(args.runs):
        for case in args.cases:
            measure_case(case, args, done[case], turn)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS))
    for case, engines in done.items():
        for engine in args.engines:
            print(line_of(case, engine, engines[engine], engines[args.engines[0]]))


if __name__ == "__main__":
    main()
