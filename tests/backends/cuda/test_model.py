"""Whole models on the Hopper ops: as close to the released roundings as another order of sums allows, in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import goldens
from backends.cuda import pair
from deepinfer import LLM, SamplingParams
from engine.test_same_tokens import mixed_prompts

pytestmark = pair.on_device
DRAW = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)


def results(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[object, ...]]]:
    outputs = llm.generate(prompts, DRAW)
    return [[(entry.token_id, entry.logprob, *entry.top) for entry in output.logprobs] for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, device="cuda", max_num_requests=32) as llm:
        yield llm


def test_logits_agree_with_the_oracle(llm: LLM) -> None:
    difference = goldens.relative_difference(llm.score(goldens.prompt(200).tokens), goldens.logits(200, "exact"))
    assert np.median(difference) <= 0.15  # torch's ops in `fast`, on a CPU, differ as much


@pytest.mark.parametrize("size", [2, 7, 32])
def test_a_batch_changes_no_bit_of_a_request(llm: LLM, size: int) -> None:
    prompts = mixed_prompts(32)[:size]
    assert results(llm, prompts) == [results(llm, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_change_no_bit_of_a_request(llm: LLM, chunk: int) -> None:
    options = {"device": "cuda", "max_num_requests": 8, "max_chunk_tokens": chunk}
    with LLM(goldens.CHECKPOINT, **options) as chunked:
        assert results(chunked, mixed_prompts(32)[:6]) == results(llm, mixed_prompts(32)[:6])
