"""Drafts on the small model: accepted tokens, decode rates with and without drafts, and what scheduling saves.

    PYTHONPATH=src python benchmarks/drafts.py [--batches 1,2,4,8,16,32,64] [--seconds 120] [--out drafts.json]
    python benchmarks/drafts.py --only-rates --modes none,scheduled --seconds 80    # rates alone: 7 times 80 seconds
    python benchmarks/drafts.py --plot drafts.svg --out drafts.json    # of a report that is there; needs matplotlib

Three parts. Accepted drafts: greedy answers to PER_SKILL prompts of each skill of the model's evaluation, 64 at a
time, all drafts checked. Selection: the same where a checked draft costs a fixed share of what a row costs, as in a
step that computes at full rate; the policy then leaves out drafts, and what is accepted falls less. Rates: engines
that take `--batches` requests at a time work off more of them, short prompts whose reference answers are long, TOKENS
tokens each; every round runs the modes one after the other, in reversed order every other time, and ratios are medians
over rounds of mode over "none", of which `--seconds` takes as many as fit for each batch. Only steps in which as many
requests decode count, and no prompt is read. Times that engines measured in an earlier hour may mislead their policy:
remove ~/.cache/deepinfer/steps first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.cli.plot import new_figure, save
from deepinfer.messages import StepPlan, StepResult
from deepinfer.speculate.costs import StepCosts
from deepinfer.speculate.policy import CheckWorthwhile

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
MODES: dict[str, dict[str, Any]] = {
    "none": {"num_draft_tokens": 0},
    "all": {"draft_scheduling": False},
    "scheduled": {"draft_scheduling": True},
}
ONE_BY_ONE = {"draft_scheduling": False, "async_scheduling": False}  # no row is planned past an answer's end
PER_SKILL = 4
TOKENS = 32
PROMPT_TOKENS = 128  # at most, for rates
LEAST_ROUNDS = 3
LEAST_REQUESTS = 8  # a round of rates has these, and two for each place
SLOPES = (0.2, 0.4, 0.6, 0.8, 1.0)  # cost of a checked draft, in rows


class Saturated(StepCosts):
    """Every row costs 1 and every checked draft `slope`, however many there are."""

    def __init__(self, slope: float) -> None:
        super().__init__([1, 2], [1.0, 2.0])
        self._slope = slope

    def seconds(self, num_tokens: NDArray[np.integer] | int) -> NDArray[np.float64]:
        numbers = np.atleast_1d(num_tokens)
        return numbers[0] + self._slope * (numbers - numbers[0])


class FixedCosts(CheckWorthwhile):
    """The policy on such costs, where drafting costs nothing."""

    def __init__(self, num_drafts: int, slope: float) -> None:
        super().__init__(num_drafts, Saturated(slope), StepCosts([1, 2], [0.0, 0.0]))

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        pass

    def observe_drafting(self, num_rows: int, seconds: float) -> None:
        pass

    def wants_drafts(self, num_rows: int) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=120.0, help="of rounds for each batch")
    parser.add_argument("--modes", default=",".join(MODES), help="to rate, none among them")
    parser.add_argument("--only-rates", action="store_true")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    args = parser.parse_args()
    if args.plot is not None:
        return draw(json.loads(args.out.read_text()), args.plot)
    batches = [int(size) for size in args.batches.split(",")]
    records = [json.loads(line) for line in EVAL.read_text().splitlines()]
    records = [record for record in records if not record["skill"].startswith("image_")]
    with LLM(device="null") as llm:
        tokenizer = llm.tokenizer
    prompts, completions, rate_prompts, by_skill = [], [], [], defaultdict(int)
    for record in records:
        tokens = tokenizer.encode(record["prompt"])
        if by_skill[record["skill"]] < PER_SKILL:
            prompts.append(tokens)
            completions.append(tokenizer.encode(record["completion"]))
        by_skill[record["skill"]] += 1
        if len(tokenizer.encode(record["completion"])) > TOKENS and len(tokens) <= PROMPT_TOKENS:
            rate_prompts.append(tokens)
    report: dict[str, Any] = {} if args.only_rates else counts(prompts, completions, args.num_threads)
    modes = args.modes.split(",")
    report["rates"] = [rates(rate_prompts, batch, modes, args.seconds, args.num_threads) for batch in batches]
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1))


def counts(prompts: list[list[int]], completions: list[list[int]], threads: int | None) -> dict[str, Any]:
    """The first two parts: accepted drafts, of all answers and of those that equal the reference, and selection."""
    with LLM(**ONE_BY_ONE, num_threads=threads) as llm:
        report: dict[str, Any] = {"num_prompts": len(prompts), "all": accepted(llm, prompts)}
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256), progress=False)
        known = [output.prompt_token_ids for output, told in zip(outputs, completions, strict=True)
                 if output.token_ids == told]  # fmt: skip
        report |= {"num_as_reference": len(known), "as_reference": accepted(llm, known)}
    print("all drafts checked:", report, flush=True)
    return report | {"selection": [selection(prompts, slope, report["all"], threads) for slope in SLOPES]}


def accepted(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy answers, planned one step at a time: drafts checked and accepted, and tokens given, for each step."""
    before = llm.stats().drafts
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256), progress=False)
    after = llm.stats().drafts
    counts = {
        name: getattr(after, name) - (0 if before is None else getattr(before, name))
        for name in ("proposed", "checked", "accepted")
    }
    num_steps = int(counts["proposed"][0]) - len(outputs)  # drafts follow the prompt and every step
    shares = counts["accepted"] / np.maximum(counts["checked"], 1)
    return {
        "checked_per_step": sum(output.num_checked_drafts for output in outputs) / num_steps,
        "accepted_per_step": sum(output.num_accepted_drafts for output in outputs) / num_steps,
        "tokens_per_step": sum(len(output.token_ids) - 1 for output in outputs) / num_steps,
        "share_accepted_by_place": [round(share, 3) for share in shares.tolist()],
        "calibration_error": round(after.calibration_error, 4),
    }


def selection(
    prompts: list[list[int]], slope: float, all_checked: dict[str, Any], threads: int | None
) -> dict[str, Any]:
    """What is checked and accepted when a checked draft costs `slope` rows, against checking all."""
    with LLM(**ONE_BY_ONE, num_threads=threads) as llm:
        speculation = llm._client.core.executor.speculation
        speculation._policy = FixedCosts(speculation.num_drafts, slope)
        accepted(llm, prompts)  # calibrates
        found = accepted(llm, prompts)
    line: dict[str, Any] = {"slope": slope}
    for name in ("checked", "tokens"):
        line[f"{name}_less"] = round(1 - found[f"{name}_per_step"] / all_checked[f"{name}_per_step"], 3)
    print(line | found, flush=True)
    return line | found


def draw(report: dict[str, Any], file: Path) -> None:
    """Rates by batch size beside what selection saves and loses."""
    figure, (left, right) = new_figure("Speculative decoding", 2)
    batches = [line["batch"] for line in report["rates"]]
    for mode, label in (("all", "all drafts checked"), ("scheduled", "scheduled")):
        if mode not in report["rates"][0]["range"]:
            continue
        low, high = zip(*(line["range"][mode] for line in report["rates"]), strict=True)
        left.plot(batches, [line["ratio"][mode] for line in report["rates"]], marker="o", label=label)
        left.fill_between(batches, low, high, alpha=0.15)
    left.axhline(1.0, color="gray", linewidth=1)
    left.set(
        xscale="log", xlabel="requests", ylabel="decode rate / without drafts", xticks=batches, xticklabels=batches
    )
    left.legend(frameon=False)
    lines = sorted(report["selection"], key=lambda line: line["checked_less"])
    right.plot(
        [100 * line["checked_less"] for line in lines], [100 * line["tokens_less"] for line in lines], marker="o"
    )
    right.set(xlabel="drafts checked less, %", ylabel="tokens a step less, %", xlim=(0, None), ylim=(0, None))
    save(figure, file)


def rates(
    prompts: list[list[int]], batch: int, modes: list[str], seconds: float, threads: int | None
) -> dict[str, Any]:
    """Tokens a second of each mode at one batch size."""
    most = max(LEAST_REQUESTS, batch) * PROMPT_TOKENS  # a batch of prompts in one step, so that all decode after it
    common = {"max_num_requests": batch, "num_threads": threads, "max_step_tokens": most, "max_prefill_tokens": most}
    llms = {mode: LLM(**common, **MODES[mode]) for mode in modes}
    rate: dict[str, list[float]] = {mode: [] for mode in llms}
    checked: dict[str, list[float]] = {mode: [] for mode in llms}
    count = max(LEAST_REQUESTS, 2 * batch)
    turn, end = -1, time.perf_counter() + seconds
    while turn < LEAST_ROUNDS or time.perf_counter() < end:
        chosen = [prompts[(turn * count + place) % len(prompts)] for place in range(count)]
        texts = {}
        for mode in list(llms) if turn % 2 else list(reversed(llms)):
            found, checks, texts[mode] = decode_rate(llms[mode], chosen, batch)
            if turn >= 0:  # the first warms up
                rate[mode].append(found)
                checked[mode].append(checks)
        assert all(text == texts["none"] for text in texts.values()), "drafts changed a text"
        turn += 1
    line = {"batch": batch, "rounds": turn, "tokens_per_s": {}, "ratio": {}, "range": {}, "checked_per_token": {}}
    for mode, found_rates in rate.items():
        line["tokens_per_s"][mode] = round(statistics.median(found_rates), 1)
        ratios = [one / base for base, one in zip(rate["none"], found_rates, strict=True)]
        line["ratio"][mode] = round(statistics.median(ratios), 3)
        line["range"][mode] = (round(min(ratios), 3), round(max(ratios), 3))
        line["checked_per_token"][mode] = round(statistics.mean(checked[mode]), 3)
        llms[mode].close()
    print(line, flush=True)
    return line


def decode_rate(llm: LLM, prompts: list[list[int]], batch: int) -> tuple[float, float, list[list[int]]]:
    """Tokens a second of steps in which `batch` requests decode, drafts checked for each token, and the texts."""
    executor = llm._client.core.executor
    execute, ended, spent, num_tokens = executor.execute, 0.0, 0.0, 0

    def timed(plan: StepPlan) -> StepResult:
        nonlocal ended, spent, num_tokens
        began, result = ended, execute(plan)
        ended = time.perf_counter()
        if began and len(plan.slots) == batch and not plan.is_prefill.any():
            spent += ended - began
            num_tokens += len(result.token_ids)
        return result

    executor.execute = timed
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    executor.execute = execute
    checks = sum(output.num_checked_drafts for output in outputs) / (len(outputs) * TOKENS)
    return num_tokens / spent, checks, [output.token_ids for output in outputs]


if __name__ == "__main__":
    main()
