"""Answers under a grammar, through the whole engine: every answer that ends is valid."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import goldens
from constrained import KINDS
from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.structured.grammar import Grammar
from waiting import PATIENCE, wait_until

CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def nano() -> Iterator[LLM]:
    with LLM(max_num_requests=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_weights() -> Iterator[LLM]:
    """Nano's sizes and vocabulary with random weights, in a pool so small that requests are preempted."""
    with LLM(load_format="dummy", max_num_requests=8, num_blocks=3, max_step_tokens=64) as llm:
        yield llm


def requests(count: int, **params: float) -> tuple[list[SamplingParams], list[object]]:
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    return (
        [SamplingParams(structured_outputs=form, seed=i, **params) for i, (form, _) in enumerate(kinds)],
        [is_valid for _, is_valid in kinds],
    )


def check(outputs: list, validators: list) -> int:
    """Assert that whatever ended by itself is valid; how many did."""
    ended = [(output, is_valid) for output, is_valid in zip(outputs, validators, strict=True)]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}, [output.error for output in outputs]
    for output, is_valid in ended:
        assert output.finish_reason == "length" or is_valid(output.text), (output.text, output.finish_reason)
    return sum(output.finish_reason == "stop" for output in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_of_nano_that_ends_is_valid(nano: LLM, temperature: float) -> None:
    params, validators = requests(2 * len(KINDS), temperature=temperature, max_tokens=80)
    outputs = nano.generate(["What is 12 + 30? "] * len(params), params)
    assert check(outputs, validators) > len(params) // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_of_random_weights_that_ends_is_valid_despite_preemption(
    random_weights: LLM, temperature: float
) -> None:
    before = random_weights.stats().num_preemptions
    params, validators = requests(2 * len(KINDS), temperature=temperature, max_tokens=60)
    prompts = [np.random.default_rng(i).integers(3, 4000, 121 + i % 7).tolist() for i in range(len(params))]
    outputs = random_weights.generate(prompts, params)
    assert check(outputs, validators) >= len(params) // 4
    assert random_weights.stats().num_preemptions > before
    assert random_weights.stats().num_free_blocks == 3


def test_an_answer_is_the_same_alone_among_others_and_after_preemption(nano: LLM) -> None:
    params, _ = requests(len(KINDS), temperature=1.0, max_tokens=40)
    prompts = [f"Prompt {i}: " for i in range(len(KINDS))]
    together = [output.token_ids for output in nano.generate(prompts, params)]
    assert [nano.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)] == together


def test_requests_without_a_grammar_get_the_same_tokens_beside_those_with_one(nano: LLM) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    alone = nano.generate("Tell me", free)[0].token_ids
    params, _ = requests(len(KINDS), temperature=1.0, max_tokens=20)
    outputs = nano.generate(["Tell me"] * (len(params) + 1), [free, *params])
    assert outputs[0].token_ids == alone


def test_logprobs_are_the_models_own(nano: LLM) -> None:
    """At the first token, whatever the grammar allows of it."""
    bound = SamplingParams(structured_outputs={"choice": ["@@"]}, temperature=0.0, logprobs=2)
    free = SamplingParams(temperature=0.0, logprobs=2, max_tokens=1)
    first, other = (nano.generate("What is", params)[0].logprobs[0] for params in (bound, free))
    assert first.top == other.top and first.token_id != other.token_id and first.rank > 1


def test_the_answer_ends_where_the_grammar_does(nano: LLM) -> None:
    output = nano.generate("x", SamplingParams(structured_outputs={"regex": "[0-9]{3}"}, temperature=0.0))[0]
    assert output.finish_reason == "stop" and output.stop_reason in nano.tokenizer.eos_ids
    assert len(output.text) == 3 and output.text.isdecimal()


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_with_thinking_the_grammar_begins_after_it(nano: LLM, temperature: float) -> None:
    params = SamplingParams(
        structured_outputs={"regex": "Sum: [0-9]{1,4}"}, temperature=temperature, seed=1, max_tokens=400
    )
    output = nano.chat(CHAT, params, thinking=True)[0]
    assert output.reasoning and (output.finish_reason == "length" or output.content.startswith("Sum: "))
    plain = nano.chat(CHAT, SamplingParams(temperature=temperature, seed=1, max_tokens=400), thinking=True)[0]
    assert output.reasoning == plain.reasoning


def test_a_response_format_is_enforced(nano: LLM) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    output = nano.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=60), response_format=format)[0]
    assert output.finish_reason == "stop" and isinstance(json.loads(output.content)["sum"], int)
    with pytest.raises(RequestError, match="both give a grammar"):
        nano.chat(CHAT, SamplingParams(structured_outputs={"regex": "a"}), response_format=format)


def test_so_args_begin_at_the_trigger_and_the_bound_token_forces_it(nano: LLM) -> None:
    free = nano.generate("Tell me", SamplingParams(temperature=1.0, seed=5, max_tokens=12))[0].token_ids
    args = {"schema_type": "regex", "schema": "[0-9]{2}", "bound_token_id": free[4]}
    args["trigger_token_ids"] = [free[0], free[4], 100, 101]
    params = SamplingParams(so_args=args, temperature=1.0, seed=5, max_tokens=40)
    output = nano.generate("Tell me", params)[0]
    first = free.index(free[4])
    assert output.token_ids[: first + 3] == [*free[: first + 1], 100, 101]
    rest = nano.tokenizer.decode(output.token_ids[first + 3 :])
    assert output.finish_reason == "stop" and len(rest) == 2 and rest.isdecimal()


def test_a_bad_grammar_is_refused_alone(nano: LLM) -> None:
    with pytest.raises(RequestError, match="regex cannot be compiled: .* parenthesis is not closed"):
        nano.generate("x", SamplingParams(structured_outputs={"regex": "("}))
    with pytest.raises(RequestError, match="left recursion"):
        list(nano.stream("x", SamplingParams(structured_outputs={"grammar": 'root ::= root "a" | "b"'})))
    params = [SamplingParams(structured_outputs={"regex": regex}, max_tokens=9) for regex in ("(?<=a)b", "ab")]
    refused, answered = nano.generate(["x", "x"], params)
    assert refused.finish_reason == "error" and "Lookbehind is not supported" in refused.error
    assert answered.text == "ab"


@pytest.fixture
def compiled(nano: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars with the word "slow" wait for this before they are compiled."""
    server, gate = nano._client._grammars._server, threading.Event()
    compile_in_helper = server._answer

    def held(grammar: Grammar) -> bytes | str:
        assert "slow" not in grammar.text or gate.wait(PATIENCE)
        return compile_in_helper(grammar)

    monkeypatch.setattr(server, "_answer", held)
    yield gate
    gate.set()


def test_a_grammar_that_compiles_for_long_holds_up_nobody(nano: LLM, compiled: threading.Event) -> None:
    answered = []

    def answer(name: str, **params: Any) -> None:
        nano.generate("x", SamplingParams(max_tokens=2, **params))
        answered.append(name)

    slow = threading.Thread(target=answer, args=("slow",), kwargs={"structured_outputs": {"regex": "slow"}})
    slow.start()
    wait_until(lambda: nano._client.num_requests == 1)
    answer("free")
    answer("quick", structured_outputs={"regex": "quick"})
    compiled.set()
    slow.join()
    assert answered == ["free", "quick", "slow"]


def test_a_request_can_be_aborted_while_its_grammar_compiles(nano: LLM, compiled: threading.Event) -> None:
    outputs = []
    params = SamplingParams(structured_outputs={"regex": "slow again"})
    reader = threading.Thread(target=lambda: outputs.extend(nano.stream("x", params, request_id="waits")))
    reader.start()
    wait_until(lambda: nano.abort("waits"))
    reader.join()
    assert outputs[-1].finish_reason == "abort" and outputs[-1].token_ids == []


def test_stop_texts_and_length_end_an_answer_early(nano: LLM) -> None:
    form = {"regex": "[0-9]{5}x[0-9]{5}"}
    stopped = nano.generate("x", SamplingParams(structured_outputs=form, stop="x", temperature=0.0))[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == "x" and len(stopped.text) == 5
    cut = nano.generate("x", SamplingParams(structured_outputs=form, max_tokens=2, temperature=0.0))[0]
    assert cut.finish_reason == "length" and len(cut.token_ids) == 2


def test_without_model_or_tokenizer_a_grammar_is_refused() -> None:
    with (
        LLM(goldens.CHECKPOINT, device="null", num_blocks=16) as llm,
        pytest.raises(RequestError, match="this engine runs without model or tokenizer"),
    ):
        llm.generate([1, 2], SamplingParams(structured_outputs={"regex": "a"}))


def test_closing_ends_the_helper_processes() -> None:
    with LLM(max_num_requests=2) as llm:
        llm.generate("x", SamplingParams(structured_outputs={"regex": "a"}))
        process = llm._client._grammars._server._process
        assert process.poll() is None
    assert process.returncode == 0
