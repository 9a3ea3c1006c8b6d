"""Several answers to one prompt: all different, all repeatable, one output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import goldens
from deepinfer import LLM, RequestError, SamplingParams

PROMPT = goldens.prompt(17).tokens


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, max_num_requests=4, num_blocks=64) as one:
        yield one


@pytest.fixture(scope="module")
def nano() -> Iterator[LLM]:
    with LLM(max_num_requests=4, num_blocks=64) as one:
        yield one


def sampled(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 2.0, "n": 5} | values)


def tokens(output: Any) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def test_samples_of_a_seed_differ_and_repeat_and_the_first_is_the_only_one_s(llm: LLM) -> None:
    first, again = llm.generate([PROMPT, PROMPT], sampled(seed=4))
    assert tokens(first) == tokens(again) and len({tuple(one) for one in tokens(first)}) == 5
    assert first.token_ids == tokens(first)[0] == llm.generate(PROMPT, sampled(seed=4, n=1))[0].token_ids
    assert tokens(llm.generate(PROMPT, sampled(seed=4, n=3))[0]) == tokens(first)[:3]
    other = llm.generate(PROMPT, sampled(seed=5))[0]
    assert not {tuple(one) for one in tokens(other)} & {tuple(one) for one in tokens(first)}


def test_samples_without_a_seed_differ_in_and_between_requests(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 2, sampled())
    assert len({tuple(one) for output in outputs for one in tokens(output)}) == 10


def test_a_single_answer_looks_as_ever(llm: LLM) -> None:
    output = llm.generate(PROMPT, sampled(n=1, seed=1))[0]
    assert output.outputs == [output] and list(output.more) == [] and output.as_dict()["more"] == []


def test_the_other_answers_are_whole_outputs_under_the_same_id(llm: LLM) -> None:
    output = llm.generate(PROMPT, sampled(seed=1, logprobs=1, prompt_logprobs=0, n=3))[0]
    assert {answer.request_id for answer in output.outputs} == {output.request_id}
    assert [answer.finish_reason for answer in output.outputs] == ["length"] * 3
    assert [len(answer.logprobs) for answer in output.outputs] == [12] * 3
    assert [answer.prompt_logprobs is None for answer in output.outputs] == [False, True, True]
    record = json.loads(json.dumps(output.as_dict()))
    assert [answer["token_ids"] for answer in record["more"]] == tokens(output)[1:]


def test_a_stream_tells_the_answers_apart(llm: LLM) -> None:
    params = sampled(seed=9, n=3, stop=["a", "e"], max_tokens=30)
    expected = llm.generate(PROMPT, params)[0]
    deltas = list(llm.stream(PROMPT, params, request_id="mine"))
    assert {delta.request_id for delta in deltas} == {"mine"}
    for sample, answer in enumerate(expected.outputs):
        own = [delta for delta in deltas if delta.sample == sample]
        assert "".join(delta.text for delta in own) == answer.text
        assert [token for delta in own for token in delta.token_ids] == answer.token_ids
        assert [delta.finish_reason for delta in own if delta.finish_reason] == [answer.finish_reason]


def test_an_abort_ends_all_answers_and_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(max_tokens=5000, n=3), request_id="all")
    first = next(stream)
    assert llm.abort("all")
    reasons = [delta.finish_reason for delta in [first, *stream] if delta.finish_reason]
    assert reasons == ["abort"] * 3 and not llm.abort("all")
    assert not llm._ids._owners and not llm._ids._more and llm.stats().num_running == 0


def test_leaving_the_stream_ends_all_answers(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(max_tokens=5000, n=3))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64) and not llm._ids._more


def test_a_refused_prompt_is_refused_once_and_alone(llm: LLM) -> None:
    bad, good = llm.generate([[640], PROMPT], sampled(seed=1))
    assert bad.finish_reason == "error" and len(good.outputs) == 5
    with pytest.raises(RequestError, match="prompt holds token id 640"):
        llm.generate([640], sampled())


def test_more_answers_than_slots_and_places_in_the_queue_all_come() -> None:
    with LLM(goldens.CHECKPOINT, device="null", max_num_requests=2, max_queue=2) as llm:
        outputs = llm.generate([[1], [2], [3]], sampled(n=20, seed=1))
        assert [len(output.outputs) for output in outputs] == [20] * 3
        assert all(len(answer.token_ids) == 12 for output in outputs for answer in output.outputs)
        assert not llm._ids._owners and not llm._ids._more


def test_chats_have_several_answers_too(nano: LLM) -> None:
    messages = [{"role": "user", "content": "Write a short story."}]
    params = SamplingParams(max_tokens=16, temperature=2.0, seed=3, n=3)
    output = nano.chat(messages, params)[0]
    assert len({answer.content for answer in output.outputs}) == 3
    deltas = list(nano.stream_chat(messages, params))
    for sample, answer in enumerate(output.outputs):
        assert "".join(delta.answer.content for delta in deltas if delta.sample == sample) == answer.content
