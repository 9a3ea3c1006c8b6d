"""Drafts on the small model: accepted tokens, decode rates with and without drafts, and what scheduling saves.

    PYTHONPATH=src python benchmarks/drafts.py [--batches 1,2,4,8,16,32,64] [--rounds 5] [--out drafts.json]

Two parts. Accepted drafts: greedy answers to `PER_SKILL` prompts of each skill of the model's evaluation, all drafts
checked and then those that the policy chooses. Rates: `--batches` requests at once, prompts whose reference
answers are long, TOKENS tokens each; every round runs the modes one after the other, in reversed order every other
time, and ratios are medians over rounds of mode over "none". Only decoding counts: from the last request's first
token on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.messages import DraftCounts

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
MODES: dict[str, dict[str, Any]] = {
    "none": {"num_draft_tokens": 0},
    "all": {"draft_scheduling": False},
    "scheduled": {"draft_scheduling": True},
}
PER_SKILL = 4
TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    records = [json.loads(line) for line in EVAL.read_text().splitlines()]
    records = [record for record in records if not record["skill"].startswith("image_")]
    llms = {mode: LLM(num_threads=args.num_threads, **options) for mode, options in MODES.items()}
    tokenizer = llms["none"].tokenizer
    prompts, long_prompts, by_skill = [], [], defaultdict(int)
    for record in records:
        tokens = tokenizer.encode(record["prompt"])
        if by_skill[record["skill"]] < PER_SKILL:
            prompts.append(tokens)
        by_skill[record["skill"]] += 1
        if len(tokenizer.encode(record["completion"])) > TOKENS and len(tokens) < 400:
            long_prompts.append(tokens)
    report = {"accepted": {mode: accepted(llms[mode], prompts) for mode in ("all", "scheduled")}}
    for mode, figures in report["accepted"].items():
        print(f"{mode}: {len(prompts)} prompts, {figures}", flush=True)
    report["rates"] = [rates(llms, long_prompts, batch, args.rounds) for batch in batches]
    for llm in llms.values():
        llm.close()
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1))


def accepted(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy answers: drafts accepted and checked for each row that had some, and of all rows."""
    before, params = llm.stats(), SamplingParams(temperature=0.0, max_tokens=256)
    outputs = llm.generate(prompts, params, progress=False)
    counts = difference(llm.stats().drafts, before.drafts)
    num_tokens = sum(output.num_generated_tokens for output in outputs)
    num_accepted = sum(output.num_accepted_drafts for output in outputs)
    num_rows = (
        num_tokens - num_accepted - len(outputs)
    )  # rows give one token each besides; first tokens are the prompts'
    return {
        "accepted_per_step": round(num_accepted / num_rows, 3),
        "checked_per_step": round(sum(output.num_checked_drafts for output in outputs) / num_rows, 3),
        "share_accepted_by_place": [round(a / max(1, c), 3) for a, c in zip(*counts, strict=True)],
        "calibration_error": round(llm.stats().drafts.calibration_error, 4),
    }


def difference(after: DraftCounts, before: DraftCounts | None) -> tuple[list[int], list[int]]:
    """Accepted and checked drafts by place."""
    parts = ((after.accepted, before and before.accepted), (after.checked, before and before.checked))
    accepted, checked = ((new - (0 if old is None else old)).tolist() for new, old in parts)
    return accepted, checked


def rates(llms: dict[str, LLM], prompts: list[list[int]], batch: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each mode at one batch size."""
    seconds: dict[str, list[float]] = {mode: [] for mode in llms}
    checked: dict[str, list[float]] = {mode: [] for mode in llms}
    for turn in range(-1, rounds):  # the first warms up
        chosen = [prompts[(turn * batch + place) % len(prompts)] for place in range(batch)]
        texts = {}
        for mode in list(llms) if turn % 2 else list(reversed(llms)):
            took, checks, texts[mode] = decode_seconds(llms[mode], chosen)
            if turn >= 0:
                seconds[mode].append(took)
                checked[mode].append(checks)
        assert all(text == texts["none"] for text in texts.values()), "drafts changed a text"
    line = {"batch": batch, "tokens_per_s": {}, "ratio": {}, "range": {}, "checked_per_token": {}}
    for mode, took in seconds.items():
        line["tokens_per_s"][mode] = round(statistics.median(batch * (TOKENS - 1) / one for one in took), 1)
        ratios = [base / one for base, one in zip(seconds["none"], took, strict=True)]
        line["ratio"][mode] = round(statistics.median(ratios), 3)
        line["range"][mode] = (round(min(ratios), 3), round(max(ratios), 3))
        line["checked_per_token"][mode] = round(statistics.mean(checked[mode]), 3)
    print(line, flush=True)
    return line


def decode_seconds(llm: LLM, prompts: list[list[int]]) -> tuple[float, float, list[list[int]]]:
    """Seconds from the last first token to the last token, drafts checked for each token, and the texts."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    first = max(output.first_token_seconds for output in outputs)
    checks = sum(output.num_checked_drafts for output in outputs) / (len(outputs) * TOKENS)
    return max(output.total_seconds for output in outputs) - first, checks, [output.token_ids for output in outputs]


if __name__ == "__main__":
    main()
