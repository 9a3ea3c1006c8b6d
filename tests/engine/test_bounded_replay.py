"""Bounded decoder replay: the prompt alone decides which tokens pass the decoder half (golden model, float32)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import goldens
from deepinfer import LLM, RequestOutput, SamplingParams

KEEP = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
STREAM = (goldens.prompt(200).tokens + goldens.prompt(33).tokens) * 2
PROMPTS = [STREAM[start : start + length] for start, length in ((0, 190), (20, 150), (40, 100), (3, 41), (5, 60))]
SHORT = [STREAM[7 : 7 + length] for length in (1, 5, 39, 40)]


def engine(**options: Any) -> LLM:
    return LLM(goldens.CHECKPOINT, precision="float32", **{"max_num_requests": 8, "num_blocks": 64} | options)


def bounded(**options: Any) -> LLM:
    return engine(decoder_replay="bounded", replay_keep_tokens=KEEP, **options)


def assert_alike(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Same tokens, and log-probabilities that differ by the order of float32 sums alone.

    Sums of other order may round a cached vector the other way, which moves a log-probability by 1e-3
    here; one window vector too many or too few moves it by 1e-2 and more.
    """
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        values = [[line.logprob for line in output.logprobs] for output in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=5e-3)


@pytest.fixture(scope="module")
def whole() -> Iterator[LLM]:
    """Prompts of any length in one chunk."""
    with bounded(async_scheduling=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole: LLM) -> list[RequestOutput]:
    """Each long prompt alone and whole."""
    return [whole.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def test_prompts_up_to_keep_give_what_full_replay_gives(whole: LLM) -> None:
    with engine() as full:
        assert_alike(whole.generate(SHORT, GREEDY), full.generate(SHORT, GREEDY))


def test_longer_prompts_lose_something(expected: list[RequestOutput]) -> None:
    """Otherwise the tests of this file compare full replay with itself."""
    with engine() as full:
        outputs = full.generate(PROMPTS, GREEDY)
    with bounded() as llm:
        ours = llm.generate(PROMPTS, GREEDY)
    assert all(one.logprobs[0] != other.logprobs[0] for one, other in zip(ours, outputs, strict=True))


@pytest.mark.parametrize("chunk", [3, 7, 64])
def test_chunks_change_nothing(expected: list[RequestOutput], chunk: int) -> None:
    with bounded(max_chunk_tokens=chunk) as llm:
        assert_alike(llm.generate(PROMPTS[:1], GREEDY), expected[:1])
        assert_alike(llm.generate(PROMPTS, GREEDY), expected)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_changes_nothing(expected: list[RequestOutput], is_async: bool) -> None:
    with bounded(async_scheduling=is_async) as llm:
        assert_alike(llm.generate(PROMPTS + PROMPTS[:2], GREEDY), expected + expected[:2])


@pytest.mark.parametrize("keep", [1, 3, 10])
def test_windows_begin_at_the_kept_tokens_in_every_step(keep: int) -> None:
    """Fewer kept tokens than a window: chunks that end inside it, and decode steps of their own or in company."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [prompt[:30] for prompt in PROMPTS]
    options = {"decoder_replay": "bounded", "replay_keep_tokens": keep}
    with engine(async_scheduling=False, **options) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    with engine(max_num_requests=2, max_chunk_tokens=7, **options) as llm:
        assert_alike(llm.generate(prompts, params), alone)
    with engine(layers=(0,)) as full, engine(layers=(0,), **options) as llm:  # no decoder half at all
        assert_alike(llm.generate(prompts, params), full.generate(prompts, params))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [7, None])
def test_preemption_changes_nothing(is_async: bool, chunk: int | None) -> None:
    """Prompts just below a block border, whose answers cross it: each needs two blocks, three must do for all."""
    prompts = [STREAM[start : start + 122] for start in (0, 11, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    with bounded() as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    with bounded(num_blocks=3, async_scheduling=is_async, max_chunk_tokens=chunk) as llm:
        assert_alike(llm.generate(prompts, params), alone)
        assert llm.stats().num_preemptions > 0 and llm.stats().num_free_blocks == 3


def test_scores_pass_every_layer_all_the_same(whole: LLM) -> None:
    difference = goldens.relative_difference(whole.score(goldens.prompt(200).tokens), goldens.logits(200, "float32"))
    assert sorted(difference)[100] <= 1e-6 and difference.max() <= 1e-2  # a cached vector may round the other way


@pytest.mark.parametrize(("num_prompt", "chunk"), [(100, 20), (100, 64), (41, 1), (30, 10)])
def test_only_the_kept_tokens_run_the_decoder_half(num_prompt: int, chunk: int) -> None:
    """Tokens that pass each layer's experts, over a whole request; chunks before the kept ones do not run them."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with bounded(max_chunk_tokens=chunk, async_scheduling=False, num_draft_tokens=0) as llm:
        bound = llm._client.core.executor.model
        calls, passed = Counter[int](), Counter[int]()
        layer_of = {id(parts.experts): layer for layer, parts in enumerate(bound.model.layers)}
        bound.model.ops.experts = count_calls(bound.model.ops.experts, layer_of, calls, passed)
        llm.generate(STREAM[:num_prompt], params)
    boundary, num_layers = bound.model.config.boundary, bound.model.config.num_layers
    assert 0 < boundary < num_layers
    num_kept, num_steps = min(num_prompt, KEEP), -(-num_prompt // chunk) + 2
    num_silent = (num_prompt - num_kept) // chunk  # chunks that end before the kept tokens
    for layer in range(num_layers):
        is_decoder = layer >= boundary
        assert passed[layer] == (num_kept if is_decoder else num_prompt) + 2
        assert calls[layer] == num_steps - (num_silent if is_decoder else 0)


def count_calls(experts: Any, layer_of: dict[int, int], calls: Counter[int], passed: Counter[int]) -> Any:
    def counted(x: Any, chosen: Any, share: Any, prepared: Any) -> Any:
        calls[layer_of[id(prepared)]] += 1
        passed[layer_of[id(prepared)]] += len(x)
        return experts(x, chosen, share, prepared)

    return counted
