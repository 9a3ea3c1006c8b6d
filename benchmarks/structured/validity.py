"""Constrained requests on the small model and on random weights: do answers fit, and do drafts change any.

    PYTHONPATH=src:tests python benchmarks/structured/validity.py [--requests 300]

Schemas, regular expressions, EBNF and choices, a third each at temperature 0, 1 and 2, each once without drafts and
once with. "tiny pool" has three cache blocks for prompts that each grow into a second one, so requests are preempted
and computed again. An answer that reaches max_tokens (80) is cut and counts as neither valid nor invalid. Ends with
code 1 when an answer is invalid or differs from the first run's of its weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from constrained import KINDS
from deepinfer import LLM, SamplingParams
from deepinfer.frontend.outputs import RequestOutput

WEIGHTS: dict[str, dict[str, Any]] = {"nano": {}, "random weights": {"load_format": "dummy"}}
POOLS: dict[str, dict[str, Any]] = {
    "": {"max_num_requests": 32},
    ", tiny pool": {"max_num_requests": 8, "num_blocks": 3, "max_step_tokens": 64},
}
DRAFTS: dict[str, dict[str, Any]] = {"": {"num_draft_tokens": 0}, ", drafts": {"draft_scheduling": False}}


def run(options: dict[str, Any], num_requests: int) -> tuple[list[RequestOutput], str]:
    """The answers, and what was counted."""
    params = [
        SamplingParams(
            structured_outputs=KINDS[i % len(KINDS)][0],
            temperature=float(i // len(KINDS) % 3),
            seed=i,
            max_tokens=80,
        )
        for i in range(num_requests)
    ]
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 4000, 121 + i % 7).tolist() for i in range(num_requests)]
    started = time.monotonic()
    with LLM(batch_invariant=True, **options) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        num_preemptions = llm.stats().num_preemptions
    reasons = Counter(output.finish_reason for output in outputs)
    checked, accepted = (
        sum(getattr(output, f"num_{name}_drafts") for output in outputs) for name in ("checked", "accepted")
    )
    return outputs, (
        f"{reasons['stop']} ended, {reasons['length']} cut, {reasons['error']} errors, {num_preemptions} preemptions, "
        f"{accepted} of {checked} drafts accepted, {time.monotonic() - started:.0f} s"
    )


def num_invalid(outputs: list[RequestOutput]) -> int:
    """Ended answers that do not fit, which are printed."""
    count = 0
    for number, output in enumerate(outputs):
        form, is_valid = KINDS[number % len(KINDS)]
        if output.finish_reason == "error" or (output.finish_reason == "stop" and not is_valid(output.text)):
            print(f"  INVALID {form!r:.60}: {output.text!r} {output.error or ''}")
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    num_requests, is_bad = parser.parse_args().requests, False
    for weights, some in WEIGHTS.items():
        expected: list[list[int]] | None = None
        for pool, more in POOLS.items():
            for drafts, options in DRAFTS.items():
                outputs, counted = run({**some, **more, **options}, num_requests)
                found = [output.token_ids for output in outputs]
                expected = expected or found
                num_different = sum(one != other for one, other in zip(found, expected, strict=True))
                invalid = num_invalid(outputs)
                is_bad |= invalid + num_different > 0
                name = weights + pool + drafts
                print(f"{name:34} {invalid} invalid, {num_different} differ; {counted}", flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
