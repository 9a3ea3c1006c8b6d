"""Many streams for a long time: errors, latencies, and what the web process costs beside the engine.

    python benchmarks/serve/soak.py --minutes 10 --streams 64 [options of `deepinfer serve`]

The offline rate is that of `LLM.generate` with the same number of requests at work, in a process of its own before the
server starts. Overhead is the web process's processor time over the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

from server import running

from deepinfer.load.client import Outcome, Target
from deepinfer.load.plan import Lengths, random_asks
from deepinfer.load.report import report

OFFLINE = """\
import json, sys, time
import numpy as np
from deepinfer import LLM, SamplingParams
streams, tokens = map(int, sys.argv[1:])
random = np.random.default_rng(0)
with LLM(max_num_requests=streams) as llm:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = [random.integers(16, 4000, 64).tolist() for _ in range(streams)]
    llm.generate(prompts, params, progress=False)
    started = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    print(json.dumps(streams * tokens / (time.perf_counter() - started)))
"""


async def load(url: str, streams: int, tokens: int, seconds: float) -> list[Outcome]:
    """So many streams at work until the time is over."""
    target, deadline, outcomes = Target(url), time.perf_counter() + seconds, []

    async def one(seed: int) -> None:
        while time.perf_counter() < deadline:
            (ask,) = random_asks(1, Lengths(32, 96), Lengths(tokens, tokens), largest_token=4000, seed=seed)
            outcomes.append(await target.ask(ask, time.perf_counter(), 600))
            seed += streams

    await asyncio.gather(*map(one, range(streams)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--idle", type=int, default=32, help="connections that ask nothing")
    parser.add_argument("--offline", action=argparse.BooleanOptionalAction, default=True)
    args, flags = parser.parse_known_args()
    if args.offline:
        words = [sys.executable, "-c", OFFLINE, str(args.streams), str(args.tokens)]
        offline = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        print(f"offline: {offline:.0f} tokens/s with {args.streams} requests at work")
    with running("--max-num-requests", str(args.streams), *flags) as server:
        host, port = server.url.removeprefix("http://").split(":")

        async def idle() -> None:
            writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(args.idle)]
            before = server.cpu_seconds()
            await asyncio.sleep(5)
            after = server.cpu_seconds()
            print(f"{args.idle} idle connections: {after[0] - before[0]:.2f} s of processor time in 5 s (web process)")
            for writer in writers:
                writer.close()

        asyncio.run(idle())
        before, memory = server.cpu_seconds(), server.memory_mib()
        outcomes = asyncio.run(load(server.url, args.streams, args.tokens, 60 * args.minutes))
        web, engine = (b - a for a, b in zip(before, server.cpu_seconds(), strict=True))
        figures = report(outcomes, {})
        gaps = figures["inter_token_ms"]
        print(json.dumps(figures, indent=1))
        print(f"inter-token p99 / p50: {gaps['p99'] / gaps['p50']:.2f}")
        tokens = sum(outcome.num_tokens for outcome in outcomes)
        print(f"web {web:.1f} s, engine {engine:.1f} s of processor time ({web / engine:.1%}); "
              f"{1e6 * web / tokens:.0f} us of the web process a token")  # fmt: skip
        print(f"memory (web, engine) MiB: {memory} before, {server.memory_mib()} after")
    return 0 if not figures["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
