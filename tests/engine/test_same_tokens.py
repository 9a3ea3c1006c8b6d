"""However a request is cut, batched or interrupted, its tokens are the same (golden model, float32)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import goldens
from deepinfer import LLM, SamplingParams

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = goldens.prompt(200).tokens + goldens.prompt(200).greedy + goldens.prompt(33).tokens + goldens.prompt(33).greedy


def mixed_prompts(count: int) -> list[list[int]]:
    """Stretches of different lengths (1 to 190) and beginnings."""
    draw = np.random.default_rng(count)
    starts, lengths = draw.integers(0, 60, count), draw.integers(1, 190, count)
    return [LONG[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, precision="float32", max_num_requests=32, async_scheduling=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[list[int]]:
    """Each of 32 prompts generated with nothing beside it."""
    return [texts(plain, [prompt])[0] for prompt in mixed_prompts(32)]


@pytest.mark.parametrize("size", [2, 7, 32])
def test_batches_of_mixed_lengths_equal_each_request_alone(plain: LLM, alone: list[list[int]], size: int) -> None:
    prompts = mixed_prompts(32)
    for first in range(0, 32 - size + 1, size):
        assert texts(plain, prompts[first : first + size]) == alone[first : first + size]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
def test_chunked_prompts_equal_whole_ones(alone: list[list[int]], chunk: int) -> None:
    options = {"max_num_requests": 8, "max_chunk_tokens": chunk}
    with LLM(goldens.CHECKPOINT, precision="float32", **options) as llm:
        assert texts(llm, mixed_prompts(32)[:6]) == alone[:6]
        whole = goldens.logits(200, "float32")
        difference = goldens.relative_difference(llm.score(goldens.prompt(200).tokens), whole)
    assert np.median(difference) <= 1e-6 and difference.max() <= 1e-2


@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_in_a_tiny_pool_changes_nothing(plain: LLM, is_async: bool) -> None:
    prompts = [LONG[start : start + 121 + start] for start in range(7)]  # each answer grows into a second block
    few = {"max_num_requests": 16, "num_blocks": 3, "max_step_tokens": 64, "num_draft_tokens": 0}
    options = {"async_scheduling": is_async, **few}
    with LLM(goldens.CHECKPOINT, precision="float32", **options) as llm:
        assert texts(llm, prompts) == texts(plain, prompts)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == 3


def test_planning_ahead_changes_nothing(alone: list[list[int]]) -> None:
    with LLM(goldens.CHECKPOINT, precision="float32", max_num_requests=32, async_scheduling=True) as llm:
        assert texts(llm, mixed_prompts(32)) == alone


def test_prefill_of_t_tokens_equals_prefill_of_one_less_and_a_decode_step(plain: LLM) -> None:
    prompt = LONG[:1]
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, logprobs=0)
    stepped = plain.generate([prompt], params)[0]  # position t comes from t decode steps
    whole = plain.score(prompt + stepped.token_ids).astype(np.float64)  # and here from one prefill
    logprobs = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    assert stepped.logprobs is not None
    for position, (token, line) in enumerate(zip(stepped.token_ids, stepped.logprobs, strict=True)):
        assert token == whole[position].argmax()
        assert line.logprob == pytest.approx(
            logprobs[position, token], abs=5e-2
        )  # a cached vector may round the other way
