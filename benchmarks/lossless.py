"""Whether drafts change a text: many prompts, every number of drafts, schedule, batch size, chunking and interruption.

    PYTHONPATH=src python benchmarks/lossless.py [--prompts 200] [--tokens 32]

Greedy and seeded (temperature 1, top-p 0.9) texts of the small model without drafts, against those of each case.
Prints one line a case and ends with code 1 if a text differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer import LLM, SamplingParams

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"


def cases() -> list[tuple[int, dict[str, Any]]]:
    """Batch size and engine options."""
    found: list[tuple[int, dict[str, Any]]] = []
    for num_drafts, batch in itertools.product((1, 3, 5), (1, 7, 32)):
        for scheduled in (False, True):
            found.append((batch, {"num_draft_tokens": num_drafts, "draft_scheduling": scheduled}))
    for chunk in (5, 64):
        found.append((32, {"draft_scheduling": False, "max_chunk_tokens": chunk}))
    found.append((32, {"draft_scheduling": False, "async_scheduling": False}))
    few = {"num_blocks": 6, "max_num_requests": 16, "max_step_tokens": 128}
    return [*found, (64, few | {"draft_scheduling": False}), (64, few | {"num_draft_tokens": 3})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=args.tokens, ignore_eos=True)
    with LLM(num_draft_tokens=0, batch_invariant=True) as llm:
        records = [json.loads(line) for line in EVAL.read_text().splitlines()]
        prompts = [llm.tokenizer.encode(record["prompt"]) for record in records if "image" not in record["skill"]]
        prompts = [tokens for tokens in prompts if len(tokens) + args.tokens <= 640]
        prompts = prompts[:: len(prompts) // args.prompts][: args.prompts]
        expected = [texts(llm, prompts, params, 64) for params in (greedy, seeded)]
    num_different = 0
    for batch, options in cases():
        started = time.monotonic()
        with LLM(batch_invariant=True, **options) as llm:
            found = [texts(llm, prompts, params, batch) for params in (greedy, seeded)]
            stats = llm.stats()
        pairs = [zip(*pair, strict=True) for pair in zip(expected, found, strict=True)]
        different = sum(one != other for pair in pairs for one, other in pair)
        num_different += different
        print(
            f"batch {batch}, {options}: {different} of {2 * len(prompts)} texts differ; "
            f"{stats.drafts.mean_accepted:.2f} drafts accepted a step of {stats.drafts.num_rows} with drafts, "
            f"{stats.num_preemptions} preemptions, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 1 if num_different else 0


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch: int) -> list[list[int]]:
    """Token ids of the answers, `batch` requests at a time."""
    found: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[first : first + batch], params, progress=False)
        found += [output.token_ids for output in outputs]
    return found


if __name__ == "__main__":
    sys.exit(main())
