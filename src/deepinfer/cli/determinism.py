"""Whether requests get the same bits however an engine runs them: the requests, their traces, the ways to run them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.cli.common import random_tokens
from deepinfer.errors import RequestError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

BATCH_SIZES = (2, 7, 32)
CHUNKS = (1, 7, 64)
THREADS = (1, 2, 3)
NUM_FEW = 8  # requests in each engine of its own
NUM_TOKENS = 12  # of each answer
Trace = dict[str, str]  # what was computed -> its value, spelled so that equal texts are equal bits


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}


@dataclass(frozen=True)
class Request:
    """Random tokens, answered greedily or by seeded sampling."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Comparison:
    """How the requests that ran in one way compare with the same requests alone.

    first_difference: the request, what differs first, and the two values; None = nothing does.
    """

    name: str
    num_requests: int
    num_different: int
    first_difference: str | None


def make_requests(llm: LLM) -> list[Request]:
    """As many as the largest batch has, half of them greedy, half drawn at temperature 1 and top-p 0.9.

    Two of each eight answer with JSON that fits a schema, a drawn one and a greedy one; the others do not end early.
    Prompts have all lengths up to a block and a half, more short ones; most of the first few need one more block for
    their answers, so that some have to wait or be interrupted when blocks are few.
    """
    random, block = np.random.default_rng(0), llm.stats().block_tokens
    longest = llm.max_model_len - NUM_TOKENS
    if longest < 1:
        raise RequestError(f"max_model_len is {llm.max_model_len}; answers of {NUM_TOKENS} tokens must fit, raise it")
    requests = []
    for number in range(max(BATCH_SIZES)):
        is_growing = number < NUM_FEW - 2
        length = block - number % NUM_TOKENS if is_growing else int(1.5 * block * random.random() ** 2)
        prompt = random_tokens(random, llm, min(max(length, 1), longest))
        temperature = 1.0 if number % 4 < 2 else 0.0
        form: dict[str, Any] = (
            {"structured_outputs": {"json": SCHEMA}} if number % 8 in (1, 3) else {"ignore_eos": True}
        )
        params = SamplingParams(
            temperature=temperature, top_p=0.9, seed=number, max_tokens=NUM_TOKENS, logprobs=20, **form
        )
        requests.append(Request(prompt, params))
    return requests


def run(llm: LLM, requests: Sequence[Request]) -> list[Trace]:
    """Answers and prompt logits of these requests, all at the same time. Raises RequestError when one fails."""
    prompts = [request.prompt for request in requests]
    outputs = llm.generate([*prompts], [request.params for request in requests], progress=False)
    with ThreadPoolExecutor(len(requests)) as pool:
        logits = list(pool.map(lambda prompt: _logits(llm, prompt), prompts))
    return [scores | _answer(output) for scores, output in zip(logits, outputs, strict=True)]


def run_alone(llm: LLM, requests: Sequence[Request]) -> list[Trace]:
    """The same, one request after the other."""
    return run_batches(llm, requests, 1)


def run_batches(llm: LLM, requests: Sequence[Request], size: int) -> list[Trace]:
    """The same in batches of this size, in an order of their own."""
    order = np.random.default_rng(size).permutation(len(requests)).tolist()
    traces: dict[int, Trace] = {}
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        traces.update(zip(batch, run(llm, [requests[place] for place in batch]), strict=True))
    return [traces[place] for place in range(len(requests))]


def compare(name: str, alone: Sequence[Trace], traces: Sequence[Trace]) -> Comparison:
    """Requests that ran in some way against themselves alone; `alone` may have more of them, at its end."""
    differences = [
        f"request {number}, {difference}"
        for number, (expected, found) in enumerate(zip(alone, traces, strict=False))
        if (difference := first_difference(expected, found)) is not None
    ]
    return Comparison(name, len(traces), len(differences), differences[0] if differences else None)


def first_difference(expected: Trace, found: Trace) -> str | None:
    """The first value that is not the same, and what it is alone and here."""
    for name, value in expected.items():
        if (other := found.get(name, "not there")) != value:
            return f"{name}: {value} alone, {other} here"
    return None


def engine_variants(llm: LLM, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Engine options that must change nothing; numbers of threads are not among them."""
    few_blocks = max(num_blocks(llm, [request]) for request in requests) + 1  # for two requests, until both grow
    variants: list[dict[str, Any]] = [{"max_chunk_tokens": chunk} for chunk in CHUNKS]
    variants.append({"num_blocks": few_blocks, "kv_cache_bytes": None})
    if llm.stats().drafts is not None and llm.config.speculate.draft_acceptance == "coupled":
        variants += [{"num_draft_tokens": 0}, {"num_draft_tokens": 1}]
        variants.append({"draft_scheduling": not llm.config.speculate.draft_scheduling})
    return [*variants, {"async_scheduling": not llm.config.scheduler.async_scheduling}]


def num_blocks(llm: LLM, requests: Sequence[Request]) -> int:
    """Cache blocks that these requests fill together."""
    block = llm.stats().block_tokens
    return sum(-(-(len(request.prompt) + NUM_TOKENS) // block) for request in requests)


def variant_name(options: dict[str, Any], num_preemptions: int) -> str:
    """As in `max_chunk_tokens 7`; with few blocks, also how often a request was interrupted."""
    ((name, value),) = [(name, value) for name, value in options.items() if value is not None]
    return f"{name} {value}" + (f" (preemptions: {num_preemptions})" if name == "num_blocks" else "")


def _answer(output: RequestOutput) -> Trace:
    if output.error is not None or output.logprobs is None:
        raise RequestError(f"a request of the check failed: {output.error}")
    trace: Trace = {"number of answer tokens": str(len(output.token_ids))}
    for place, (token, line) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        trace[f"answer token {place}"] = str(token)
        for other, value in [(token, line.logprob), *line.top]:
            trace[f"log-probability of {other} as answer token {place}"] = f"{value:.9g}"  # tells all float32 apart
    return trace


def _logits(llm: LLM, prompt: list[int]) -> Trace:
    return {
        f"logits after prompt token {place} (hash)": hashlib.sha256(row.tobytes()).hexdigest()[:16]
        for place, row in enumerate(llm.score(prompt))
    }
