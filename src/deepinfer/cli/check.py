"""`deepinfer check determinism`: does a request get the same bits, however the engine runs it, and from every op?

Requests are random prompts, half of them answered greedily and half at temperature 1, top-p 0.9
and a seed. Compared are token ids, log-probabilities and the logits of every prompt position, with
those of the request alone. Then each op of the table: what it gives a row alone, with the same
inputs, against the row's share of a batch. Exit code 0: all is equal; 1: something differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.cli import determinism
from deepinfer.cli.common import add_engine_flags, describe, open_llm, progress
from deepinfer.cli.determinism import Comparison, Request, Trace
from deepinfer.errors import ConfigError
from deepinfer.messages import OpCheck

OP_CHUNK = 48  # prompt tokens of a request in a step, so that steps hold prompts and answers


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    checks = commands.add_parser("check", help="check what an engine promises").add_subparsers(
        title="checks", metavar="CHECK", required=True
    )
    parser = checks.add_parser("determinism", help="the same bits alone, in batches, in chunks, ...?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Report:
    """All verdicts: of ways to run requests, and of ops by name."""

    setting: dict[str, Any]
    requests: list[Comparison]
    ops: dict[str, OpCheck]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        counts = [way.num_different for way in self.requests] + [op.num_different for op in self.ops.values()]
        return not any(counts)

    @property
    def backends(self) -> dict[str, dict[str, Any]]:
        """By backend: how many of its ops ran, and which of them are not batch-invariant."""
        found: dict[str, dict[str, Any]] = {}
        for name, check in self.ops.items():
            backend = found.setdefault(check.backend, {"num_ops": 0, "different": []})
            backend["num_ops"] += 1
            backend["different"] += [name] if check.num_different else []
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for JSON."""
        return {**asdict(self), "backends": self.backends, "is_equal": self.is_equal}

    def as_text(self) -> str:
        """One line a verdict, differences below theirs."""
        lines = [", ".join(f"{name} {value}" for name, value in self.setting.items())]
        lines += ["", "requests, against each alone"]
        for way in self.requests:
            lines += _verdict(way.name, "requests", way.num_requests, way.num_different, way.first_difference)
        for backend in self.backends:
            lines += ["", f"ops of backend {backend}, rows alone against rows in a batch"]
            for name, op in self.ops.items():
                if op.backend == backend:
                    lines += _verdict(name, "calls", op.num_calls, op.num_different, op.first_difference)
        lines.append("")
        for backend, found in self.backends.items():
            names, count = ", ".join(found["different"]), found["num_ops"]
            lines.append(f"{backend}: " + (f"differs: {names}" if names else f"{count} of {count} ops are equal"))
        ways = [way.name for way in self.requests if way.num_different]
        lines.append("requests: " + (f"differ: {'; '.join(ways)}" if ways else "all are equal"))
        return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Check, print the verdicts; returns 1 when something differs."""
    with open_llm(args) as llm:
        model = llm.config.model
        if model.device == "null":
            raise ConfigError("device is 'null', which computes nothing; check a device that does")
        requests = determinism.make_requests(llm)
        few = requests[: determinism.NUM_FEW]
        alone, comparisons = compare_batches(llm, requests)
        variants = determinism.engine_variants(llm, few)
        num_blocks = determinism.num_blocks(llm, few)
        setting = describe(llm) | {"decoder_replay": model.decoder_replay}
    ops = check_ops(args, few, {"max_chunk_tokens": OP_CHUNK, "num_blocks": num_blocks, "kv_cache_bytes": None})
    if any(check.backend == "cpu" for check in ops.values()):  # the native ops, which have threads of their own
        variants += [{"num_threads": count} for count in determinism.THREADS]
    for options in progress(variants, "engines", len(variants)):
        comparisons.append(compare_engine(args, options, few, alone))
    report = Report(setting, comparisons, ops)
    print(json.dumps(report.as_dict()) if args.json else report.as_text())
    return 0 if report.is_equal else 1


def compare_batches(llm: Any, requests: Sequence[Request]) -> tuple[list[Trace], list[Comparison]]:
    """Each request alone, and then in every other way that one engine can run them."""
    alone, few = determinism.run_alone(llm, requests), requests[: determinism.NUM_FEW]
    found = [determinism.compare("alone again", alone, determinism.run_alone(llm, few))]
    for size in determinism.BATCH_SIZES:
        traces = determinism.run_batches(llm, requests, size)
        found.append(determinism.compare(f"batches of {size}, another order", alone, traces))
    return alone, found


def compare_engine(
    args: argparse.Namespace, options: dict[str, Any], requests: Sequence[Request], alone: Sequence[Trace]
) -> Comparison:
    """The requests together in an engine with these options."""
    with open_llm(args, **options) as llm:
        traces = determinism.run(llm, requests)
        name = determinism.variant_name(options, llm.stats().num_preemptions)
    return determinism.compare(name, alone, traces)


def check_ops(args: argparse.Namespace, requests: Sequence[Request], options: dict[str, Any]) -> dict[str, OpCheck]:
    """The verdict on every op that these requests need, from an engine that runs them in parts too."""
    with open_llm(args, check_ops=True, time_ops=False, **options) as llm:
        determinism.run(llm, requests)
        return llm.stats().op_checks


def _verdict(name: str, things: str, count: int, num_different: int, difference: str | None) -> list[str]:
    if not num_different:
        return [f"  {name:<36} equal    {count} {things}"]
    return [f"  {name:<36} differs  {num_different} of {count} {things}", f"      first: {difference}"]
