"""`deepinfer bench rank`: one rank of a large expert-parallel group, alone on a Hopper card, with dummy weights.

Only the model's config.json is read. Decode steps stand at the end of --context tokens with all their drafts;
prefill steps hold whole prompts of --length tokens. Tokens a second count --acceptance of the drafts as accepted.
What other ranks would do is left out: exchange of tokens, waiting, experts beyond the local ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.common import count, counts, share
from deepinfer.cli.plot import add_plot_flag, new_figure, save
from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from deepinfer.rank.measure import Case


# Requests of a rank and tokens/s of a user that DeepInfer 0.1.0 publishes for SM100 (25,000 tokens/s at 256 requests,
# 300 a user at 8), scaled to an H200: the same shares, 37.0 % and 19.3 %, of what memory and matrix units allow.
PUBLISHED = {8: 179.0, 256: 45.3}
PUBLISHED_SETTING = {"ranks": 64, "context": 131072, "drafts": 3, "acceptance": 0.75}


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser of `bench`."""
    parser = commands.add_parser("rank", help="emulate one rank of an expert-parallel group", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="folder or file of the config.json")
    parser.add_argument("--ranks", type=count, default=64, help="of the group (default: 64)")
    parser.add_argument("--context", type=count, default=131072, help="tokens of each request (default: 131072)")
    parser.add_argument("--drafts", type=count, default=3, help="checked in a step (default: 3)")
    parser.add_argument("--acceptance", type=share, default=0.75, help="assumed share of accepted drafts (0.75)")
    parser.add_argument("--requests", type=counts, default=(8, 256), metavar="N,...", help="decode (default: 8,256)")
    parser.add_argument("--prefill", type=counts, default=(4096, 65536), metavar="N,...", help="tokens of a step")
    parser.add_argument("--length", type=count, default=4096, help="tokens of a prompt (default: 4096)")
    parser.add_argument("--repeat", type=count, default=9, help="measured steps of each case (default: 9)")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    add_plot_flag(parser, "draw tokens/s of the card against tokens/s of a user")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every case and print the tables."""
    longest = max(args.prefill, default=args.length)
    if any(tokens % args.length for tokens in args.prefill):
        raise ConfigError(f"--prefill holds whole prompts; give multiples of --length, which is {args.length}")
    from deepinfer.rank.measure import Rank

    rank = Rank(
        args.model, num_ranks=args.ranks, num_requests=max(*args.requests, longest // args.length, 1),
        context=args.context, num_drafts=args.drafts, acceptance=args.acceptance,
    )  # fmt: skip
    cases: list[Case] = []
    for num_requests in args.requests:
        cases.append(rank.decode(num_requests, args.repeat))
        print(line(cases[-1]), flush=True)
    for num_tokens in args.prefill:
        cases.append(rank.prefill(num_tokens, args.length, min(args.repeat, 3)))
        print(line(cases[-1]), flush=True)
    print(op_table(cases))
    setting = {name: getattr(args, name) for name in ("ranks", "context", "drafts", "acceptance", "length")}
    if args.json:
        Path(args.json).write_text(
            json.dumps({"setting": setting, "cases": [asdict(case) for case in cases]}, indent=1)
        )
    if args.plot:
        save(draw(cases, setting), args.plot)
    return 0


def line(case: Case) -> str:
    """One case in words."""
    floor = sum(case.floors.values())
    return (
        f"{case.kind} of {case.num_requests} requests, {case.num_tokens} tokens: {case.step_ms:.1f} ms "
        f"({case.step_low_ms:.1f}-{case.step_high_ms:.1f}), forward {case.forward_ms:.1f} (floor {floor:.1f}), "
        f"host {case.host_ms:.2f}; {case.tokens_per_s:,.0f} tokens/s, {case.tokens_per_s_user:,.1f} a user"
    )


def op_table(cases: Sequence[Case]) -> str:
    """Milliseconds of each op in each case, and its floor's share of them."""
    names = sorted({name for case in cases for name in case.ops}, key=lambda name: -max(_of(c, name) for c in cases))
    lines = ["", f"{'ms (of floor)':<18}" + "".join(f"{f'{case.kind} {case.num_tokens}':>18}" for case in cases)]
    for name in names:
        cells = []
        for case in cases:
            time, floor = _of(case, name), case.floors.get(name)
            share = f" ({100 * floor / time:.0f} %)" if floor and time else ""
            cells.append(f"{f'{time:.2f}{share}':>18}")
        lines.append(f"{name:<18}" + "".join(cells))
    total = "".join(f"{f'{sum(case.ops.values()):.1f}':>18}" for case in cases)
    return "\n".join([*lines, f"{'sum':<18}{total}"])


def draw(cases: Sequence[Case], setting: Mapping[str, Any]) -> Figure:
    """Tokens/s of the card over tokens/s of a user, one point a batch size of the decode steps.

    Beside them, in the setting for which they are published, DeepInfer's points.
    """
    decoded = [case for case in cases if case.kind == "decode"]
    figure, (panel,) = new_figure(f"Decoding on one rank of {setting['ranks']}, context {setting['context']:,}")
    users, card = [case.tokens_per_s_user for case in decoded], [case.tokens_per_s for case in decoded]
    label = f"{setting['drafts']} drafts, {100 * setting['acceptance']:g} % accepted\nbeside a point: requests"
    panel.margins(0.1)
    panel.plot(users, card, marker="o", label=label)
    for case in decoded:
        place = (case.tokens_per_s_user, case.tokens_per_s)
        panel.annotate(str(case.num_requests), place, xytext=(5, 5), textcoords="offset points")
    if PUBLISHED_SETTING.items() <= setting.items():
        users, card = [*PUBLISHED.values()], [number * user for number, user in PUBLISHED.items()]
        panel.plot(users, card, marker="x", linestyle=":", label="DeepInfer 0.1.0 on SM100, by floors")
    panel.set(xlabel="tokens/s of a user", ylabel="tokens/s of the card", xlim=(0, None), ylim=(0, None))
    panel.legend()
    return figure


def _of(case: Case, name: str) -> float:
    return case.ops.get(name, 0.0)
