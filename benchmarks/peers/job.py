"""One measurement, the same for every engine: its prompts, its clock and what it prints. Standard library only.

A runner (`run_*.py`) loads its engine and calls `measure` with a function that answers prompts. It is started as
`PYTHON run_X.py JOB` with a job as JSON and prints one line of JSON after `RESULT`.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULT = "RESULT "
FIRST_ORDINARY_TOKEN = 3  # ids below are begin, end and padding
WARM_UP_TOKENS, WARM_UP_SEED = 32, 1_000_000  # no job's seed: engines may remember a prompt


@dataclass(frozen=True)
class Answer:
    """Seconds from the start of the batch to the first and the last token, and the greedy tokens."""

    first_s: float
    last_s: float
    token_ids: list[int]


@dataclass(frozen=True)
class Job:
    """A batch of random prompts of one length, each answered greedily by a fixed number of tokens."""

    folder: str
    num_threads: int
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    seed: int

    def prompts(self, num_tokens: int, seed: int) -> list[list[int]]:
        """Random token ids, the same ones in every engine."""
        config = json.loads(Path(self.folder, "config.json").read_text())
        vocabulary = range(FIRST_ORDINARY_TOKEN, config["text_config"]["vocab_size"])
        choices = [token for token in vocabulary if token != config.get("image_token_id")]
        chooser = random.Random(seed)
        return [[chooser.choice(choices) for _ in range(num_tokens)] for _ in range(self.num_requests)]


def measure(job: Job, answer: Callable[[list[list[int]], int], list[Answer]]) -> None:
    """Warm up with short prompts, time the job, check the answers and print the figures.

    Prefill is the prompt tokens over the time until every request has a token; decode is the number of requests over
    the time per token after the first of the fastest request, which waited for no other's prompt. `cores` is how many
    cores were used, `others` the share of the machine that other processes used meanwhile.
    """
    answer(job.prompts(WARM_UP_TOKENS, WARM_UP_SEED), 3)
    prompts = job.prompts(job.prompt_tokens, job.seed)
    machine, own, start = machine_seconds(), sum(os.times()[:2]), time.perf_counter()
    answers = answer(prompts, job.answer_tokens)
    elapsed = time.perf_counter() - start
    machine, own = machine_seconds() - machine, sum(os.times()[:2]) - own
    assert [len(item.token_ids) for item in answers] == [job.answer_tokens] * job.num_requests, "an answer is short"
    result = {
        "prefill": job.num_requests * job.prompt_tokens / max(item.first_s for item in answers),
        "cores": own / elapsed,
        "others": (machine - own) / elapsed / (os.cpu_count() or 1),
        "peak_mb": peak_mb(),
        "token_ids": [item.token_ids for item in answers],
    }
    if job.answer_tokens > 1:
        step_s = min((item.last_s - item.first_s) / (job.answer_tokens - 1) for item in answers)
        result["decode"] = job.num_requests / step_s
    print(RESULT + json.dumps(result), flush=True)


def machine_seconds() -> float:
    """CPU seconds that the whole machine has spent on anything, steal included."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def peak_mb() -> float:
    """Most resident memory of this process so far, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6
