"""Sampling parameters end to end: what they do to an answer, in every combination, however the engine runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import goldens
from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.frontend.bad_words import bad_word_ids
from deepinfer.frontend.outputs import RequestOutput
from parameter_cases import cases, choices
from sampling.reference import Row

VOCAB, EOS = 640, 1
LONG = goldens.prompt(200).tokens
# Where rules beside the model choose tokens, the reference below does not know them.
RULES = ("max_tokens", "seed", "n", "structured_outputs", "so_args")
CASES = cases({name: values for name, values in choices(VOCAB).items() if name not in RULES}, num_mixed=50)
PROMPTS = [LONG[number % 60 :][: 122 + number % 7] for number in range(len(CASES))]  # answers grow into a second block


def found(output: RequestOutput) -> tuple[Any, ...]:
    """Everything of an answer that shall not depend on how the engine ran it."""
    return (
        output.token_ids, output.text, output.finish_reason, output.stop_reason, output.logprobs,
        output.prompt_logprobs, (output.error or "").partition(":")[2],
    )  # fmt: skip


def engine(**options: Any) -> LLM:
    return LLM(goldens.CHECKPOINT, batch_invariant=True, **{"max_num_requests": 8, "num_blocks": 64} | options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as one:
        yield one


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    return [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, CASES, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_requests": 32},
        {"max_chunk_tokens": 7, "async_scheduling": False},
        {"max_step_tokens": 40, "max_chunk_tokens": 33},
        {"num_blocks": 3, "max_step_tokens": 64},
        {"num_blocks": 3, "max_step_tokens": 64, "async_scheduling": False},
    ],
    ids=["batch", "large batch", "chunks of 7", "mixed steps", "preempted", "preempted, not ahead"],
)
def test_every_combination_gives_the_same_answer_however_it_runs(
    alone: list[RequestOutput], options: dict[str, Any]
) -> None:
    with engine(**options) as other:
        outputs = other.generate(PROMPTS, CASES)
        assert ("num_blocks" in options) == (other.stats().num_preemptions > 10)
    for params, output, expected in zip(CASES, outputs, alone, strict=True):
        assert found(output) == found(expected), params


def test_every_answer_is_what_the_reference_makes_of_the_model_s_logits(llm: LLM, alone: list[RequestOutput]) -> None:
    num_greedy = num_processed = 0
    for params, prompt, output in zip(CASES, PROMPTS, alone, strict=True):
        if output.error is not None:
            continue
        row = Row(params, prompt, bad_word_ids(params.bad_words, llm.tokenizer, VOCAB), llm.tokenizer.eos_ids)
        scores = llm.score(prompt + output.token_ids)[len(prompt) - 1 :]
        for place in range(0, len(output.token_ids), 3):
            token = output.token_ids[place]
            row.answer = output.token_ids[:place]
            logits = row.changed(scores[place].tolist())
            if params.golden_token_ids is not None:
                assert token == params.golden_token_ids[place]
            elif params.temperature < 1e-5 or params.top_k == 1 or params.top_p == 1e-9 or params.min_p == 1.0:
                assert logits[token] == pytest.approx(max(logits), abs=1e-4)
                num_greedy += 1
            else:
                assert logits[token] > -np.inf
            if params.logprobs is not None:
                is_processed = params.logprobs_mode == "processed"
                if is_processed and (params.top_k or params.top_p < 1 or params.min_p):
                    continue  # the reference has no filters; `tests/sampling/test_stages.py` is about those
                raw = Row(SamplingParams(), [])
                wanted = (row if is_processed else raw).logprobs(scores[place].tolist())
                line = output.logprobs[place]
                assert line.logprob == pytest.approx(wanted[token], abs=1e-3)
                best = sorted(wanted, reverse=True)[: params.logprobs]
                assert [value for _, value in line.top] == pytest.approx(
                    [one for one in best if one > -np.inf], abs=1e-3
                )
                num_processed += is_processed
    assert num_greedy > 20 and num_processed > 30, "the cases do not cover what they are for"


# -- what each does to an answer


def answer(llm: LLM, **values: Any) -> RequestOutput:
    return llm.generate(
        LONG[:30], SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | values)
    )[0]


def test_extreme_values_of_filters_and_temperature_are_exact(llm: LLM) -> None:
    greedy = answer(llm).token_ids
    for values in ({"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 100.0, "top_k": 1}):
        assert answer(llm, seed=1, **values).token_ids == greedy
    free = answer(llm, seed=1, temperature=100.0).token_ids
    assert answer(llm, seed=1, temperature=100.0, top_k=VOCAB + 5).token_ids == free != greedy


def test_biases_on_every_token_keep_their_differences(llm: LLM) -> None:
    assert answer(llm, logit_bias=dict.fromkeys(range(VOCAB), 100.0)).token_ids == answer(llm).token_ids
    down = {token: -100.0 for token in range(VOCAB) if token != 77}
    assert answer(llm, logit_bias=down).token_ids == [77] * 12
    assert answer(llm, temperature=1.0, seed=1, logit_bias={77: 100.0}).token_ids == [77] * 12


def test_only_allowed_tokens_are_drawn(llm: LLM) -> None:
    allowed = [3, 50, 400]
    drawn = answer(llm, temperature=100.0, seed=2, allowed_token_ids=allowed, max_tokens=40).token_ids
    assert set(drawn) == set(allowed)


def test_penalties_make_every_token_new(llm: LLM) -> None:
    stutter = {"logit_bias": {9: 40.0}, "max_tokens": 30}
    assert answer(llm, **stutter).token_ids == [9] * 30
    penalized = answer(llm, **stutter, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=100.0).token_ids
    assert len(set(penalized)) == 30 and not set(penalized) & set(LONG[:30])


def test_bad_words_are_not_written(llm: LLM) -> None:
    words = re.findall(" ([a-z]{2,})", answer(llm, max_tokens=40).text)[:3]
    assert words, "the golden text has no words to exclude"
    text = answer(llm, max_tokens=40, bad_words=words).text
    for word in words:
        sequences = bad_word_ids([word], llm.tokenizer, VOCAB)
        written = llm.generate(
            LONG[:30], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, bad_words=words)
        )
        ids = written[0].token_ids
        assert not any(ids[start : start + len(one)] == list(one) for one in sequences for start in range(40)), word
    assert text != answer(llm, max_tokens=40).text


def test_no_end_comes_before_min_tokens(llm: LLM) -> None:
    eager = {"logit_bias": {EOS: 100.0, 50: 50.0}, "ignore_eos": False, "stop_token_ids": [50]}
    assert answer(llm, **eager).token_ids == [EOS]
    late = answer(llm, **eager, min_tokens=4)
    assert late.token_ids[4:] == [EOS] and not {EOS, 50} & set(late.token_ids[:4])
    assert late.finish_reason == "stop" and late.stop_reason == EOS


def test_stop_strings_wait_for_min_tokens_and_stay_when_asked_for(llm: LLM) -> None:
    text = answer(llm).text
    stop = text[2:4]
    assert answer(llm, stop=[stop]).text == text[: text.index(stop)]
    assert answer(llm, stop=[stop], include_stop_str_in_output=True).text == text[: text.index(stop) + 2]
    late = answer(llm, stop=[stop], min_tokens=8)
    assert len(late.token_ids) >= 8 or late.stop_reason is None
    assert late.text.startswith(text[: text.index(stop) + 2])


def test_golden_tokens_are_the_answer_and_are_scored(llm: LLM) -> None:
    golden = LONG[30:50]
    output = answer(llm, golden_token_ids=golden, logprobs=1, max_tokens=None, temperature=1.0)
    assert output.token_ids == golden and output.finish_reason == "length"
    scores = llm.score(LONG[:50]).astype(np.float64)
    expected = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    for place, line in enumerate(output.logprobs, start=29):
        assert line.logprob == pytest.approx(expected[place, LONG[place + 1]], abs=1e-4)
        assert line.top[0][0] == int(scores[place].argmax())
    ended = answer(llm, golden_token_ids=[9, EOS, 9], ignore_eos=False)
    assert (ended.token_ids, ended.finish_reason) == ([9, EOS], "stop")


def test_parameters_that_leave_no_token_end_the_request_with_the_reason(llm: LLM) -> None:
    stuck = SamplingParams(allowed_token_ids=[EOS], min_tokens=2, max_tokens=5)
    bad, good = llm.generate([LONG[:30]] * 2, [stuck, SamplingParams(max_tokens=3, ignore_eos=True)])
    assert bad.finish_reason == "error" and "exclude every token of the vocabulary at position 30" in bad.error
    assert good.finish_reason == "length" and len(good.token_ids) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias holds 640; the vocabulary ends at 639"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1; each must be a token id of 0 or more"),
        ({"logit_bias": {7: 100.5}}, r"logit_bias\[7\] is 100.5; it must be between -100 and 100"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids holds 1099511627776"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids holds -1"),
        ({"stop_token_ids": [5, VOCAB]}, "stop_token_ids holds 640; the vocabulary ends at 639"),
        ({"stop_token_ids": [-(2**70)]}, "stop_token_ids holds -1180591620717411303424"),
        ({"so_args": {"schema_type": "regex", "schema": "a", "trigger_token_ids": [VOCAB]}}, "so_args holds 640"),
        ({"golden_token_ids": [0, VOCAB]}, "golden_token_ids holds 640"),
        ({"bad_words": ["xq" * 99]}, "bad_words holds 'xq.* tokens; at most 32"),
        ({"min_tokens": 13}, r"min_tokens is 13; it must be at most max_tokens \(12\)"),
        ({"n": 129, "temperature": 1.0}, "n is 129; it must be between 1 and 128"),
        ({"n": 0}, "n is 0; it must be between 1 and 128"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"temperature": 100.1}, "temperature is 100.1; it must be between 0.0 and 100.0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be finite"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ],
)
def test_what_lies_beyond_a_limit_is_refused(llm: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        answer(llm, **({"ignore_eos": False} if "so_args" in values else {}), **values)
    assert len(answer(llm).token_ids) == 12


def test_logits_that_are_not_finite_are_counted_and_end_their_request_alone() -> None:
    with engine() as llm:
        sampler = llm._client.core.executor.sampler
        sample = sampler.sample

        def broken(logits: Any, slots: Any, positions: Any, *others: Any) -> Any:
            logits[np.flatnonzero(positions == 7).tolist()] = float("nan")
            return sample(logits, slots, positions, *others[:-1])  # the likeliest tokens are those of before

        sampler.sample = broken
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, frequency_penalty=1.0, top_p=0.9, logprobs=2)
        bad, good = llm.generate([LONG[:5], LONG[:9]], params)
        assert (bad.finish_reason, len(bad.token_ids), good.finish_reason) == ("error", 2, "length")
        assert "the model gave NaN or no finite logit for position 7" in bad.error
        assert llm.stats().num_not_finite == 1
        sampler.sample = sample
        assert good.token_ids == llm.generate(LONG[:9], params)[0].token_ids
