"""How many greedy answers of the small model are the CPU's, with CUDA graphs and without, with drafts and without.

    PYTHONPATH=src python benchmarks/same_ids.py [--prompts 200] [--tokens 64] [--ids FILE] [--device cuda]

Prompts are those of the model's skills file, without images. The CPU's ids come from its native ops, with no draft;
--ids keeps them for a machine that is not to compute them. A near tie of logits may fall the other way on another
device, but not with graphs or drafts on the same one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer import LLM, SamplingParams

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
CASES: dict[str, dict[str, Any]] = {
    "graphs": {"num_draft_tokens": 0},
    "eager": {"num_draft_tokens": 0, "enforce_eager": True},
    "graphs, drafts": {},
    "eager, drafts": {"enforce_eager": True},
    "graphs, all drafts": {"draft_scheduling": False},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ids", type=Path, help="the CPU's ids: read if it is there, else written")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    if args.ids is not None and args.ids.exists():
        expected = json.loads(args.ids.read_text())
    else:
        expected, _ = answers(args.prompts, params, device="cpu", num_draft_tokens=0)
        if args.ids is not None:
            args.ids.write_text(json.dumps(expected))
    first: list[list[int]] | None = None
    for name, options in CASES.items():
        found, seconds = answers(args.prompts, params, device=args.device, **options)
        first = first or found
        print(
            f"{args.device}, {name}: {equal(found, expected)} of {len(expected)} answers are the CPU's, "
            f"{equal(found, first)} those of the first line; {sum(map(len, found)) / seconds:,.0f} tokens/s",
            flush=True,
        )
    return 0


def answers(num_prompts: int, params: SamplingParams, **options: Any) -> tuple[list[list[int]], float]:
    """Token ids of the answers, all requests at a time, and seconds of the second of two runs."""
    with LLM(max_num_requests=256, **options) as llm:
        records = [json.loads(line) for line in EVAL.read_text().splitlines()]
        prompts = [llm.tokenizer.encode(record["prompt"]) for record in records if "image" not in record["skill"]]
        prompts = prompts[:: len(prompts) // num_prompts][:num_prompts]
        for _ in range(2):
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - started
    return [output.token_ids for output in outputs], seconds


def equal(found: list[list[int]], expected: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(found, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
