"""Whole models on the Hopper ops: as close to the released roundings as another order of sums allows, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import goldens
from backends.cuda import pair
from deepinfer import LLM, SamplingParams
from engine.test_same_tokens import mixed_prompts

pytestmark = pair.on_device
DRAW = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
GREEDY = replace(DRAW, temperature=0.0)
WATCHED = 8  # requests of a batch that are compared with themselves alone
Lines = list[list[tuple[object, ...]]]


def results(llm: LLM, prompts: list[list[int]], params: SamplingParams = DRAW) -> Lines:
    outputs = llm.generate(prompts, params)
    return [[(entry.token_id, entry.logprob, *entry.top) for entry in output.logprobs or []] for output in outputs]


@pytest.fixture(scope="module", params=["graphs", "eager", "graphs, no drafts"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"num_draft_tokens": 0} if "no drafts" in request.param else {}
    options |= {"enforce_eager": request.param == "eager", "batch_invariant": True}
    with LLM(goldens.CHECKPOINT, device="cuda", max_num_requests=256, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Lines:
    """Of 256 requests those that are watched, one after the other."""
    return [results(llm, [prompt])[0] for prompt in mixed_prompts(256)[:WATCHED]]


def test_logits_agree_with_the_oracle(llm: LLM) -> None:
    difference = goldens.relative_difference(llm.score(goldens.prompt(200).tokens), goldens.logits(200, "exact"))
    assert np.median(difference) <= 0.25  # `exact` with 0.2 % of noise on attended heads differs by 0.13


@pytest.mark.parametrize("size", [2, 7, 64, 256])
def test_a_batch_changes_no_bit_of_a_request(llm: LLM, alone: Lines, size: int) -> None:
    """The watched ones stand in slots all over the batch, in a new order each time."""
    prompts, places = mixed_prompts(256), np.random.default_rng(size).permutation(size)
    found = results(llm, [prompts[place] for place in places])
    for slot, place in enumerate(places.tolist()):
        if place < WATCHED:
            assert found[slot] == alone[place]


def test_a_batch_of_which_some_are_drawn_changes_no_bit_of_a_greedy_request(llm: LLM) -> None:
    prompts = mixed_prompts(256)[:64]
    params = [GREEDY if number % 16 == 3 else DRAW for number in range(64)]
    found = llm.generate(prompts, params)
    for number in range(3, 64, 16):
        lines = [(entry.token_id, entry.logprob, *entry.top) for entry in found[number].logprobs or []]
        assert lines == results(llm, [prompts[number]], GREEDY)[0]


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_change_no_bit_of_a_request(llm: LLM, alone: Lines, chunk: int) -> None:
    options = {"device": "cuda", "max_num_requests": 8, "max_chunk_tokens": chunk}
    with LLM(goldens.CHECKPOINT, **options) as chunked:
        assert results(chunked, mixed_prompts(256)[:6]) == alone[:6]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("is_eager", [False, True])
def test_poisoned_caches_change_no_bit_and_padding_is_never_written(is_eager: bool, drafts: int) -> None:
    prompts, found = mixed_prompts(16), []
    options = {"max_num_requests": 8, "enforce_eager": is_eager, "num_draft_tokens": drafts}
    for is_poisoned in (False, True):
        with LLM(goldens.CHECKPOINT, device="cuda", **options) as llm:
            pools = llm._client.core.executor.model.pools
            if is_poisoned:
                for pool in (pools.blocks, pools.slots):
                    pool[1:] = 0xFF  # NaN as e4m3, ue8m0 or float32, and token -1
            found.append(results(llm, prompts) + results(llm, prompts, GREEDY))
            assert not pools.blocks[0].any() and not pools.slots[0].any()
    assert found[0] == found[1]
