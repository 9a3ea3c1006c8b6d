"""Prefill, first token and decode of two checkouts on a CPU, in turns: how much faster the second one is.

    python benchmarks/speed_pair.py BEFORE AFTER [--threads 2] [--rounds 7] [--ops [full | bounded]]
        [--step-tokens BEFORE,AFTER]

Each checkout is a process of its own that works whenever it is its turn, so that a machine whose speed drifts meets
both alike. Random prompts, no drafts. A round: the steps of 32 requests that decode, and, with every layer for every
token and with decoder_replay "bounded", the first token of one prompt of 2,048 tokens and of one of 512 (the best of
two). --ops adds the time of each op in a prefill of 2,048, full unless told otherwise, one op after the other behind a
clock; --step-tokens sets how many prompt tokens a step takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPLAYS = ("full", "bounded")
FIGURES = ("decode of 32, tokens/s",) + tuple(
    f"{name}, {unit}" for replay in REPLAYS for name, unit in
    ((f"{replay} prefill of 2,048", "tokens/s"), (f"first token of 512 after a {replay} prefill", "ms"))
)  # fmt: skip
DECODE_TOKENS = 24  # of each of the 32 requests


def work(threads: int, step_tokens: int | None, ops: str) -> None:
    """Answer each line of standard input with the figures of a turn, as JSON; the end of it ends the process."""
    import numpy as np

    from deepinfer.llm import LLM
    from deepinfer.ops import clock
    from deepinfer.sampling.params import SamplingParams

    clock.GROUP_OF.update({name: name for name in clock.GROUP_OF})  # ops, not their groups
    random = np.random.default_rng(0)

    def generate(llm: LLM, count: int, length: int, num_tokens: int) -> tuple[float, float]:
        """Median seconds to the first token and to the last."""
        prompts = random.integers(10, 3900, (count, length)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        return (
            statistics.median(output.first_token_seconds or 0.0 for output in outputs),
            statistics.median(output.total_seconds or 0.0 for output in outputs),
        )

    options = {} if step_tokens is None else {"max_prefill_tokens": step_tokens}
    with contextlib.ExitStack() as stack:
        llms = [
            stack.enter_context(
                LLM(
                    device="cpu",
                    num_threads=threads,
                    num_draft_tokens=0,
                    decoder_replay=replay,
                    time_ops=bool(ops),
                    **options,
                )  # fmt: skip
            )
            for replay in ([ops] if ops else REPLAYS)
        ]
        for llm in llms:
            for _ in range(2):
                generate(llm, 1, 2048, 1)
        generate(llms[0], 32, 32, DECODE_TOKENS)
        print("ready", flush=True)
        for _ in sys.stdin:
            if ops:
                before = llms[0].stats().op_seconds
                generate(llms[0], 1, 2048, 1)
                after = llms[0].stats().op_seconds
                print(json.dumps({op: 1e3 * (after[op] - before.get(op, 0.0)) for op in after}), flush=True)
                continue
            first, last = generate(llms[0], 32, 32, DECODE_TOKENS)
            figures = [32 * (DECODE_TOKENS - 1) / (last - first)]
            for llm in llms:
                figures.append(2048 / generate(llm, 1, 2048, 1)[0])
                figures.append(1e3 * min(generate(llm, 1, 512, 1)[0] for _ in range(2)))
            print(json.dumps(figures), flush=True)
    os._exit(0)


def start(checkout: str, step_tokens: str, args: argparse.Namespace, ops: str) -> subprocess.Popen[str]:
    """A process of this checkout that waits for its turn."""
    command = [sys.executable, __file__, checkout, checkout, "--threads", str(args.threads), "--work"]
    environment = {**os.environ, "PYTHONPATH": str(Path(checkout) / "src")}
    command += ["--ops", ops] * bool(ops) + ["--step-tokens", step_tokens] * bool(step_tokens)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{checkout} did not start")
    return process


def turns(args: argparse.Namespace, ops: str) -> list[tuple[str, str]]:
    """What both processes said in each round; they take turns at being the first."""
    counts = args.step_tokens.split(",") if args.step_tokens else ("", "")
    checkouts = zip((args.before, args.after), counts, strict=True)
    both = [start(checkout, count, args, ops) for checkout, count in checkouts]
    rounds = []
    for number in range(args.rounds):
        said = {}
        for which in (number % 2, 1 - number % 2):
            process = both[which]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            said[which] = process.stdout.readline()
        rounds.append((said[0], said[1]))
    for process in both:
        process.communicate()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ops", nargs="?", const="full", default="", choices=REPLAYS)
    parser.add_argument("--step-tokens", default="", metavar="BEFORE,AFTER")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.threads, int(args.step_tokens) if args.step_tokens else None, args.ops)
    rounds = [tuple(json.loads(text) for text in pair) for pair in turns(args, "")]
    for number, name in enumerate(FIGURES):
        before, after = ([pair[which][number] for pair in rounds] for which in (0, 1))
        ratios = sorted((b / a if name.endswith("ms") else a / b) for b, a in zip(before, after, strict=True))
        print(
            f"{name}: {statistics.median(before):.0f} ({min(before):.0f}-{max(before):.0f}) and "
            f"{statistics.median(after):.0f} ({min(after):.0f}-{max(after):.0f}), "
            f"{statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )
    if args.ops:
        ops = [tuple(json.loads(text) for text in pair) for pair in turns(args, args.ops)]
        before, after = (
            {op: statistics.median(pair[which].get(op, 0.0) for pair in ops) for op in ops[0][1]} for which in (0, 1)
        )
        for op in sorted(after, key=lambda op: -after[op]):
            print(f"  {op}: {before[op]:.1f} and {after[op]:.1f} ms")


if __name__ == "__main__":
    main()
