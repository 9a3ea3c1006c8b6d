"""Answers of two checkouts in turns: how much faster first tokens and decode steps of the second one are.

    python benchmarks/decode_pair.py BEFORE AFTER [--threads 2] [--cases 1x128x100,32x32x40] [--rounds 15]

A case is requests x prompt tokens x tokens of an answer. Each checkout is a process of its own with an `LLM` of the
small model, without drafts; random prompts, greedy. A step is an answer's time after its first token, divided by its
other tokens; medians over the requests of a batch, then over the rounds. A machine whose speed drifts meets both alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path


def answer(threads: int) -> None:
    """For each line of standard input with a case: milliseconds to the first token and of a step."""
    import numpy as np

    from deepinfer.llm import LLM
    from deepinfer.sampling.params import SamplingParams

    random = np.random.default_rng(0)
    with LLM(device="cpu", num_threads=threads, num_draft_tokens=0) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            requests, prompt_tokens, tokens = map(int, line.split("x"))
            prompts = random.integers(10, llm.vocab_size - 200, (requests, prompt_tokens)).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            outputs = llm.generate(prompts, params, progress=False)
            firsts = [output.first_token_seconds or 0.0 for output in outputs]
            totals = [output.total_seconds or 0.0 for output in outputs]
            steps = [(total - first) / max(1, tokens - 1) for first, total in zip(firsts, totals, strict=True)]
            print(1e3 * statistics.median(firsts), 1e3 * statistics.median(steps), flush=True)


def start(checkout: str, threads: int) -> subprocess.Popen[str]:
    """A process of this checkout, which will say that it is ready for cases."""
    command = [sys.executable, __file__, checkout, checkout, "--threads", str(threads), "--answer"]
    environment = {**os.environ, "PYTHONPATH": str(Path(checkout) / "src")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def turn(process: subprocess.Popen[str], case: str) -> list[float]:
    """First token and step, milliseconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return [float(word) for word in process.stdout.readline().split()]


def report(case: str, name: str, turns: list[tuple[float, float]]) -> None:
    """Medians and bests of both, and the median ratio of the rounds with its 10 % and 90 %."""
    before, after = zip(*turns, strict=True)
    ratios = statistics.quantiles([one / two for one, two in turns], n=10)
    print(
        f"{case:>12} {name:<11} {statistics.median(before):8.3f} (best {min(before):.3f}) and "
        f"{statistics.median(after):8.3f} ms (best {min(after):.3f}), {ratios[4]:.3f} times as fast "
        f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default="1x128x100,32x32x40")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        return answer(args.threads)
    both = [start(checkout, args.threads) for checkout in (args.before, args.after)]
    for process in both:
        if process.stdout is None or process.stdout.readline().strip() != "ready":
            raise SystemExit("a checkout does not start")
    for case in args.cases.split(","):
        turns: list[list[list[float]]] = []
        for number in range(args.rounds + 1):
            first = number % 2
            times = {which: turn(both[which], case) for which in (first, 1 - first)}
            turns.append([times[0], times[1]])
        for place, name in enumerate(("first token", "step")):
            if place == 0 or not case.endswith("x1"):
                report(case, name, [(one[place], two[place]) for one, two in turns[1:]])
    for process in both:
        process.communicate()


if __name__ == "__main__":
    main()
