"""`deepinfer bench`: prefill and decode speed over batch sizes and prompt lengths.

Prompts are random token ids, new ones each time. Prefill: prompt tokens over the time until every
request of the batch has its first token. Decode: the median request's time per token after its
first one; where the prompts of a batch need several steps, a few of those steps also carry prompt
tokens. Every case warms up once, checks the number of tokens that came back, and reports the
median of the repeats with their range. Where tokens are drafted, a line for each place of a draft tells
how many were proposed, checked and accepted in all cases (few, after random tokens). Then comes the time of
each kind of op in one case, in an engine that runs them one by one behind a clock, and the most memory that
the process held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.cli import bench_rank, bench_serve
from deepinfer.cli.common import add_engine_flags, counts, describe, open_llm, progress, random_tokens
from deepinfer.errors import ConfigError, RequestError
from deepinfer.messages import DraftCounts
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("bench", help="measure prefill and decode speed")
    parser.add_argument("--batch-sizes", type=counts, default=(1, 4, 16), metavar="N,...", help="default: 1,4,16")
    parser.add_argument("--prompt-lengths", type=counts, default=(128, 512), metavar="N,...", help="default: 128,512")
    parser.add_argument("--output-length", type=int, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each case (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(title="commands", metavar="[serve | rank]", required=False)
    bench_serve.add_command(commands)
    bench_rank.add_command(commands)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass(frozen=True)
class Case:
    """What was measured for one batch size and prompt length."""

    batch_size: int
    prompt_length: int
    prefill_tokens_per_s: Spread
    first_token_ms: Spread
    decode_tokens_per_s: Spread
    step_ms: Spread


def run(args: argparse.Namespace) -> int:
    """Measure every case and print the two tables, or the JSON object."""
    if args.output_length < 2 or args.repeat < 1:
        raise ConfigError("--output-length must be at least 2 and --repeat at least 1")
    shapes = [(batch, length) for batch in args.batch_sizes for length in args.prompt_lengths]
    longest = max(args.prompt_lengths) + args.output_length
    with open_llm(args) as llm:
        if longest > llm.max_model_len:
            raise ConfigError(
                f"the longest prompt with --output-length has {longest} tokens but must have at most "
                f"{llm.max_model_len}; lower one of them or raise --max-model-len"
            )
        cases = [
            measure(llm, *shape, args.output_length, args.repeat) for shape in progress(shapes, "bench", len(shapes))
        ]
        setting, peak_bytes, drafts = describe(llm), peak_memory(), llm.stats().drafts
    with open_llm(args, time_ops=True) as llm:
        times = OpTimes(*shapes[0], *time_ops(llm, *shapes[0], args.output_length))
    if args.json:
        report: dict[str, Any] = {"setting": setting, "cases": [asdict(case) for case in cases]}
        report |= {"op_times": asdict(times), "peak_memory_bytes": peak_bytes}
        report["drafts"] = None if drafts is None else drafts.as_dict()
        print(json.dumps(report))
    else:
        print(as_text(setting, cases))
        if drafts is not None:
            print(drafts_text(drafts))
        print(f"\n{times}\n\npeak memory of the process: {peak_bytes / 2**20:.0f} MiB")
    return 0


def measure(llm: LLM, batch_size: int, prompt_length: int, output_length: int, repeat: int) -> Case:
    """Time one case: a warm-up, then `repeat` runs."""
    random = np.random.default_rng(0)
    first_s, last_s, step_s = [], [], []
    for turn in range(repeat + 1):
        prompts = [random_tokens(random, llm, prompt_length) for _ in range(batch_size)]
        firsts, totals = timed(llm, prompts, output_length)
        if turn == 0:
            continue
        first_s.append(statistics.median(firsts))
        last_s.append(max(firsts))
        steps = [(total - first) / (output_length - 1) for first, total in zip(firsts, totals, strict=True)]
        step_s.append(statistics.median(steps))
    return Case(
        batch_size,
        prompt_length,
        prefill_tokens_per_s=Spread.of([batch_size * prompt_length / seconds for seconds in last_s]),
        first_token_ms=Spread.of([1e3 * seconds for seconds in first_s]),
        decode_tokens_per_s=Spread.of([batch_size / seconds for seconds in step_s]),
        step_ms=Spread.of([1e3 * seconds for seconds in step_s]),
    )


@dataclass(frozen=True)
class OpTimes:
    """Milliseconds by kind of op for the prompts of one batch, and for each later step."""

    batch_size: int
    prompt_length: int
    prefill_ms: dict[str, float]
    step_ms: dict[str, float]

    def __str__(self) -> str:
        kinds = sorted(self.step_ms, key=lambda kind: -self.step_ms[kind])
        head = f"{'kind of op':<20}{'prefill ms':>12}{'decode step ms':>16}   (batch {self.batch_size}, "
        lines = [f"{kind:<20}{self.prefill_ms.get(kind, 0.0):>12.3f}{self.step_ms[kind]:>16.3f}" for kind in kinds]
        return "\n".join([f"{head}prompt {self.prompt_length}, one by one)", *lines])


def time_ops(
    llm: LLM, batch_size: int, prompt_length: int, output_length: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by kind of op: of a run that ends with the first tokens, and of each step that a longer run adds."""
    random = np.random.default_rng(0)
    totals: list[dict[str, float]] = []
    for num_tokens in (1, 1, output_length):  # the first one warms up
        prompts = [random_tokens(random, llm, prompt_length) for _ in range(batch_size)]
        before = llm.stats().op_seconds
        timed(llm, prompts, num_tokens)
        after = llm.stats().op_seconds
        totals.append({kind: 1e3 * (seconds - before.get(kind, 0.0)) for kind, seconds in after.items()})
    _, prefill, whole = totals
    return prefill, {kind: (whole[kind] - prefill.get(kind, 0.0)) / (output_length - 1) for kind in whole}


def peak_memory() -> int:
    """Bytes that this process held at most."""
    import resource  # which not every system has

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timed(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token and to the end, for each prompt; checks that every answer is whole."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    firsts, totals = [], []
    for output in llm.generate(prompts, params, progress=False):
        if output.error is not None or len(output.token_ids) != num_tokens:
            raise RequestError(f"an answer has {len(output.token_ids)} of {num_tokens} tokens: {output.error}")
        assert output.first_token_seconds is not None and output.total_seconds is not None, "a whole answer has times"
        firsts.append(output.first_token_seconds)
        totals.append(output.total_seconds)
    return firsts, totals


def as_text(setting: dict[str, Any], cases: Sequence[Case]) -> str:
    """Two tables: median (least-greatest) of the repeats."""
    lines = [", ".join(f"{name} {value}" for name, value in setting.items())]
    lines += ["", table_line("batch", "prompt", "prefill tokens/s", "first token ms")]
    lines += [table_line(c.batch_size, c.prompt_length, c.prefill_tokens_per_s, c.first_token_ms) for c in cases]
    lines += ["", table_line("batch", "prompt", "decode tokens/s", "step ms")]
    lines += [table_line(c.batch_size, c.prompt_length, c.decode_tokens_per_s, c.step_ms) for c in cases]
    return "\n".join(lines)


def drafts_text(counts: DraftCounts) -> str:
    """What became of drafts, by their place after the newest token."""
    lines = ["", f"{'draft':>5} {'proposed':>9} {'checked':>9} {'accepted':>9}"]
    places = zip(counts.proposed.tolist(), counts.checked.tolist(), counts.accepted.tolist(), strict=True)
    lines += [f"{place:>5} {' '.join(f'{count:>9}' for count in row)}" for place, row in enumerate(places, start=1)]
    mean, error = counts.mean_accepted, counts.calibration_error
    return "\n".join([*lines, f"accepted a step: {mean:.2f} in {counts.num_rows} rows, calibration error {error:.3f}"])


def table_line(batch: object, prompt: object, speed: object, milliseconds: object) -> str:
    return f"{batch!s:>5} {prompt!s:>6}  {speed!s:<26} {milliseconds!s:<26}".rstrip()
