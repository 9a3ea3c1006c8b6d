"""Runs a job (see `job.py`) with deepinfer."""

from __future__ import annotations

import json
import sys

from job import Answer, Job, measure

from deepinfer import LLM, SamplingParams


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    with LLM(model=job.folder, num_threads=job.num_threads) as llm:

        def answer(prompts: list[list[int]], num_tokens: int) -> list[Answer]:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            outputs = llm.generate(prompts, params, progress=False)
            return [Answer(item.first_token_seconds, item.total_seconds, item.token_ids) for item in outputs]

        measure(job, answer)


if __name__ == "__main__":
    main()
