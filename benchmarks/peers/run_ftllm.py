"""Runs a job (see `job.py`) with fastllm's CPU backend, through the calls that `ftllm benchmark` makes: JOB WORKERS.

fastllm batches requests that wait together. WORKERS is its `-t`: threads beside the one that hands them work. All of
them spin, so more threads than cores cost it most of its speed.
"""

from __future__ import annotations

import json
import sys
import time

from ftllm import llm
from ftllm.benchmark import _launch_raw_response
from ftllm.util import make_normal_llm_model, make_normal_parser
from job import Answer, Job, measure

GREEDY = {"do_sample": False, "top_p": 1.0, "top_k": 1, "temperature": 1.0, "repeat_penalty": 1.0}
POLL_S = 5e-4  # as in `ftllm benchmark`


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    flags = ["-p", job.folder, "--device", "cpu", "-t", sys.argv[2], "--max_batch", str(job.num_requests)]
    model = make_normal_llm_model(make_normal_parser("ftllm").parse_args(flags))
    library = llm.fastllm_lib

    def answer(prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        start = time.perf_counter()
        handles = [_launch_raw_response(model, prompt, num_tokens, GREEDY) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        while running:
            ready = [row for row in running if library.can_fetch_response_llm_model(model.model, handles[row])]
            for row in ready:
                token = library.fetch_response_llm_model(model.model, handles[row])
                if token < 0:
                    running.remove(row)
                else:
                    tokens[row].append(token)
                    times[row].append(time.perf_counter() - start)
            if not ready:
                time.sleep(POLL_S)
        return [Answer(when[0], when[-1], ids) for when, ids in zip(times, tokens, strict=True)]

    measure(job, answer)
    model.release_memory()


if __name__ == "__main__":
    main()
