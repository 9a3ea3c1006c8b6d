"""`deepinfer bench serve`: load on any OpenAI-style server, and the latencies that its clients see.

Closed loop: --concurrency requests are always at work. Open loop: --rate requests a second arrive at random
(Poisson), or at the times of a trace, however slow the server is; time to first token counts from then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from deepinfer.cli.plot import add_plot_flag, new_figure, save
from deepinfer.errors import ConfigError
from deepinfer.load.client import Outcome, Target
from deepinfer.load.plan import MAX_REQUESTS, Ask, Lengths, random_asks, trace_asks, with_arrivals
from deepinfer.load.report import parse_limits, report, table, times_of
from deepinfer.load.run import run as run_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTTED_PERCENTILES = (50, 99)


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser of `bench`."""
    parser = commands.add_parser("serve", help="put load on a server", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    parser.add_argument("--model", help="a name that the server knows; its first one when not given")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--requests", type=int, default=100, help="default: 100; a trace has its own number")
    parser.add_argument("--input-length", default="128", metavar="N|LOW-HIGH", help="prompt tokens (default: 128)")
    parser.add_argument("--output-length", default="64", metavar="N|LOW-HIGH", help="answer tokens (default: 64)")
    parser.add_argument("--trace", metavar="FILE", help="requests from a JSONL file, at their times if they have some")
    parser.add_argument("--rate", type=float, help="open loop: requests a second")
    parser.add_argument("--concurrency", type=int, help="most requests at work at once; closed loop without --rate")
    parser.add_argument("--goodput", nargs="*", default=[], metavar="NAME:MS", help="limits, as in ttft:500 tpot:50")
    parser.add_argument("--largest-token", type=int, default=4000, help="random prompts have ids up to this (4000)")
    parser.add_argument("--allow-eos", action="store_true", help="answers may end before their length")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_plot_flag(parser, "draw the distributions of the times")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, measure and print; returns 1 when a request failed."""
    if not 1 <= args.requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests is {args.requests}; it must be 1 to {MAX_REQUESTS}")
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency is {args.concurrency}; it must be at least 1")
    limits = parse_limits(args.goodput)
    asks = _asks(args)
    target = Target(args.url, model=args.model, key=args.api_key, ignore_eos=not args.allow_eos)
    with tqdm(total=len(asks), disable=not sys.stderr.isatty(), unit="request", leave=False) as bar:
        work = run_load(target, asks, concurrency=args.concurrency, seconds=args.timeout, note=bar.update)
        outcomes = asyncio.run(work)
    figures = report(outcomes, limits)
    print(json.dumps(figures) if args.json else table(figures))
    if args.plot:
        save(draw(outcomes), args.plot)
    return 0 if figures["completed"] == figures["requests"] else 1


def _asks(args: argparse.Namespace) -> list[Ask]:
    common = {"largest_token": args.largest_token, "seed": args.seed}
    if args.trace:
        asks = trace_asks(args.trace, **common)
    else:
        lengths = Lengths.parse(args.input_length), Lengths.parse(args.output_length)
        asks = random_asks(args.requests, *lengths, **common)
    if args.rate is not None:
        if not args.rate > 0:
            raise ConfigError(f"--rate is {args.rate}; it must be above 0")
        return with_arrivals(asks, args.rate, args.seed)
    if args.concurrency is None and all(ask.at is None for ask in asks):
        raise ConfigError("neither --rate nor --concurrency is given; say how much load there shall be")
    return asks


def draw(outcomes: Sequence[Outcome]) -> Figure:
    """For each kind of time, the share of requests (or gaps) that took at most so long."""
    times = times_of(outcomes)
    figure, panels = new_figure(f"Latencies of {len(times.e2e)} requests", 3)
    kinds = (
        ("time to first token", "requests", times.ttft),
        ("time between tokens", "gaps", times.gaps),
        ("time to the end", "requests", times.e2e),
    )
    percents = np.linspace(0, 100, 201)
    for panel, (name, things, values) in zip(panels, kinds, strict=True):
        panel.set(xlabel=f"{name}, ms", ylabel=f"{things} within it, %", ylim=(0, 101))
        if not values:
            continue
        panel.plot(np.percentile(values, percents), percents, label=f"{len(values):,} {things}")
        for percent, color in zip(PLOTTED_PERCENTILES, ("C1", "C3"), strict=True):
            value = float(np.percentile(values, percent))
            panel.axvline(value, color=color, linestyle="--", label=f"p{percent}: {value:,.1f} ms")
        panel.set(xlim=(0, None))
        panel.legend()
    return figure
