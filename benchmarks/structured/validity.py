"""Constrained requests on the small model and on random weights: how many end, and whether these are valid.

    PYTHONPATH=src:tests python benchmarks/structured/validity.py [--requests 300]

Schemas, regular expressions, EBNF and choices, a third each at temperature 0, 1 and 2. "tiny pool" has three cache
blocks for prompts that each grow into a second one, so requests are preempted and computed again. An answer that
reaches max_tokens (80) is cut and counts as neither.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import numpy as np

from constrained import KINDS
from deepinfer import LLM, SamplingParams

CASES = {
    "nano": {"max_num_requests": 32},
    "nano, tiny pool": {"max_num_requests": 8, "num_blocks": 3, "max_step_tokens": 64},
    "random weights": {"max_num_requests": 32, "load_format": "dummy"},
    "random weights, tiny pool": {
        "max_num_requests": 8, "num_blocks": 3, "max_step_tokens": 64, "load_format": "dummy",
    },
}  # fmt: skip


def run(options: dict[str, object], num_requests: int) -> str:
    kinds = [KINDS[i % len(KINDS)] for i in range(num_requests)]
    params = [
        SamplingParams(structured_outputs=form, temperature=float(i // len(KINDS) % 3), seed=i, max_tokens=80)
        for i, (form, _) in enumerate(kinds)
    ]
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 4000, 121 + i % 7).tolist() for i in range(num_requests)]
    started = time.monotonic()
    with LLM(**options) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        num_preemptions = llm.stats().num_preemptions
    reasons = Counter(output.finish_reason for output in outputs)
    invalid = [
        (form, output.text)
        for (form, is_valid), output in zip(kinds, outputs, strict=True)
        if output.finish_reason == "stop" and not is_valid(output.text)
    ]
    for form, text in invalid:
        print(f"  INVALID {form!r:.60}: {text!r}")
    return (
        f"{num_requests} requests, {reasons['stop']} ended, {len(invalid)} of them invalid, {reasons['length']} cut, "
        f"{reasons['error']} errors, {num_preemptions} preemptions, {time.monotonic() - started:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    num_requests = parser.parse_args().requests
    for name, options in CASES.items():
        print(f"{name:26} {run(options, num_requests)}", flush=True)


if __name__ == "__main__":
    main()
