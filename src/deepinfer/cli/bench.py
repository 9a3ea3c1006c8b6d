"""`deepinfer bench`: prefill and decode speed over batch sizes and prompt lengths.

Prompts are random token ids. Prefill: all prompts of a batch, one token each. Decode: the same with
more tokens, less the prefill time. Every case warms up once, checks the number of tokens that came
back, and reports the median of the repeats with their range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.cli.common import add_engine_flags, open_llm, progress
from deepinfer.errors import ConfigError, RequestError
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

FIRST_ORDINARY_TOKEN = 3  # ids below are begin, end and padding in the released tokenizer


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("bench", help="measure prefill and decode speed")
    parser.add_argument("--batch-sizes", type=_counts, default=(1, 4, 16), metavar="N,...", help="default: 1,4,16")
    parser.add_argument("--prompt-lengths", type=_counts, default=(128, 512), metavar="N,...", help="default: 128,512")
    parser.add_argument("--output-length", type=int, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each case (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


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
    with open_llm(args) as llm:
        cases = [
            measure(llm, *shape, args.output_length, args.repeat) for shape in progress(shapes, "bench", len(shapes))
        ]
        setting = describe(llm)
    if args.json:
        print(json.dumps({"setting": setting, "cases": [asdict(case) for case in cases]}))
    else:
        print(as_text(setting, cases))
    return 0


def measure(llm: LLM, batch_size: int, prompt_length: int, output_length: int, repeat: int) -> Case:
    """Time one case: a warm-up, then `repeat` pairs of a prefill run and a whole run."""
    random = np.random.default_rng(0)
    prefill, first, decode, step = [], [], [], []
    for turn in range(repeat + 1):
        # New prompts each time, so that no run can profit from an earlier one.
        prompts = random.integers(
            FIRST_ORDINARY_TOKEN, llm.tokenizer.vocab_size, (2, batch_size, prompt_length)
        ).tolist()
        short_s, short = timed(llm, prompts[0], 1)
        long_s, _ = timed(llm, prompts[1], output_length)
        if turn == 0:
            continue
        decode_s = max(long_s - short_s, 1e-9)
        prefill.append(batch_size * prompt_length / short_s)
        first.append(1e3 * statistics.median(short))
        decode.append(batch_size * (output_length - 1) / decode_s)
        step.append(1e3 * decode_s / (output_length - 1))
    return Case(batch_size, prompt_length, *map(Spread.of, (prefill, first, decode, step)))


def timed(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
    """(seconds for all prompts, seconds to the first token of each); checks that every answer is whole."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.monotonic()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.monotonic() - started
    for output in outputs:
        if output.error is not None or len(output.token_ids) != num_tokens:
            raise RequestError(f"an answer has {len(output.token_ids)} of {num_tokens} tokens: {output.error}")
    return seconds, [output.first_token_seconds or 0.0 for output in outputs]


def as_text(setting: dict[str, Any], cases: Sequence[Case]) -> str:
    """Two tables: median (least-greatest) of the repeats."""
    lines = [", ".join(f"{name} {value}" for name, value in setting.items())]
    lines += ["", table_line("batch", "prompt", "prefill tokens/s", "first token ms")]
    lines += [table_line(c.batch_size, c.prompt_length, c.prefill_tokens_per_s, c.first_token_ms) for c in cases]
    lines += ["", table_line("batch", "prompt", "decode tokens/s", "step ms")]
    lines += [table_line(c.batch_size, c.prompt_length, c.decode_tokens_per_s, c.step_ms) for c in cases]
    return "\n".join(lines)


def table_line(batch: object, prompt: object, speed: object, milliseconds: object) -> str:
    return f"{batch!s:>5} {prompt!s:>6}  {speed!s:<26} {milliseconds!s:<26}".rstrip()


def describe(llm: LLM) -> dict[str, Any]:
    """What the figures belong to."""
    model = llm.config.model
    return {"model": model.model or "deepinfer-nano", "device": model.device, "precision": model.precision}


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(int(item) for item in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds a number below 1")
    return values
