"""LLM as its callers see it: streams, threads, seeds, ends, and what it leaves of the process."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from deepinfer import LLM, EngineDeadError, RequestError, SamplingParams
from deepinfer.call import Call
from deepinfer.frontend.request_ids import RequestIds
from deepinfer.messages import StepPlan, StepResult
from waiting import PATIENCE, held, wait_until

PROMPT = goldens.prompt(17).tokens
LONG = SamplingParams(temperature=0.0, max_tokens=5000, seed=1, ignore_eos=True)
TOKENS_IN = [goldens.prompt(33).tokens, goldens.prompt(5).tokens, goldens.prompt(200).tokens[:150]]


def sampled(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 10, "ignore_eos": True} | values)


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def joined(deltas: list[Any]) -> tuple[Any, ...]:
    """What all pieces of an answer say together."""
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [line for delta in deltas for line in delta.logprobs] if deltas[0].logprobs is not None else None,
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )


def whole(output: Any) -> tuple[Any, ...]:
    return output.text, output.token_ids, output.logprobs, output.finish_reason, output.stop_reason


@pytest.fixture(scope="module")
def nano() -> Iterator[LLM]:
    with LLM(max_num_requests=4, num_blocks=64) as llm:
        yield llm


# -- streams


@pytest.mark.parametrize("params", [sampled(temperature=0.0), sampled(seed=5), sampled(seed=6, top_p=0.9, min_p=0.01)])
def test_a_stream_gives_what_generate_gives_whatever_stop_string_ends_it(golden: LLM, params: SamplingParams) -> None:
    values = {name: getattr(params, name) for name in ("temperature", "seed", "top_p", "min_p")}
    text = golden.generate(PROMPT, sampled(**values, max_tokens=20))[0].text
    stops = [text[start : start + length] for start, length in ((3, 1), (4, 6), (6, 9), (0, 2), (len(text) - 3, 3))]
    for stop in ([], *([stop] for stop in stops), stops[2:]):
        wanted = sampled(**values, max_tokens=20, stop=stop, logprobs=2)
        output = golden.generate(PROMPT, wanted)[0]
        assert joined(list(golden.stream(PROMPT, wanted))) == whole(output)
        if stop:
            cut = min(text.find(one) for one in stop if one in text)
            assert output.text == text[:cut] and output.stop_reason in stop
    assert is_idle(golden)


def test_leaving_a_stream_frees_its_blocks_and_ends_it_within_two_steps(
    null: LLM, golden: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for llm, num_times in ((null, 20), (golden, 2)):
        num_steps, abandon = [], llm._client.abandon

        def noted(*request: Any, llm: LLM = llm, num_steps: list[int] = num_steps, abandon: Any = abandon) -> None:
            abandon(*request)
            num_steps.append(llm.stats().num_steps)

        monkeypatch.setattr(llm._client, "abandon", noted)
        for _ in range(num_times):
            for number, _delta in enumerate(llm.stream(PROMPT, LONG)):
                if number == 2:
                    break
            assert is_idle(llm) and llm.stats().num_steps - num_steps[-1] <= 2
        assert len(num_steps) == num_times


def test_abort_from_another_thread_ends_a_stream_with_what_it_has(null: LLM) -> None:
    expected = null.generate([4, 5], replace(LONG, max_tokens=21))[0].token_ids
    stream = null.stream([4, 5], LONG, request_id="victim")
    answers: list[bool] = []
    with held(null, after=20) as go_on:

        def abort() -> None:
            answers.extend([null.abort("victim"), null.abort("victim")])
            go_on.set()

        first = next(stream)
        thread = threading.Thread(target=abort)
        thread.start()
        deltas = [first, *stream]
        thread.join()
    tokens, reason = joined(deltas)[1], deltas[-1].finish_reason
    assert answers == [True, False] and reason == "abort" and is_idle(null)
    assert tokens == expected[: len(tokens)] and len(tokens) <= 21
    assert null.abort("victim") is False and null.abort("never heard of") is False


def test_scoring_says_so_when_it_was_aborted(null: LLM) -> None:
    failures: list[BaseException] = []

    def score() -> None:
        try:
            null.score([1] * 8000)
        except RequestError as error:
            failures.append(error)

    number = int(null.generate([1], sampled(max_tokens=1))[0].request_id.removeprefix("request-"))
    thread = threading.Thread(target=score)
    with held(null):
        thread.start()
        wait_until(lambda: null.abort(f"request-{number + 1}"))
    thread.join()
    assert len(failures) == 1 and f"request 'request-{number + 1}' was aborted" in str(failures[0])


# -- what a text depends on


def test_scores_are_the_logits_behind_the_logprobs(golden: LLM) -> None:
    output = golden.generate(PROMPT, sampled(temperature=0.0, logprobs=3))[0]
    scores = golden.score(PROMPT + output.token_ids)
    assert scores.shape == (27, 640) and scores.dtype == np.float32
    values = torch.from_numpy(scores).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for line, token, row in zip(output.logprobs, output.token_ids, values, strict=True):
        assert line.token_id == token and line.rank == 1
        # float32 sums, and a prefill that adds up in another order than a decode step
        assert line.logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert [token for token, _ in line.top] == row.topk(3).indices.tolist()
        assert [value for _, value in line.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)


def test_texts_follow_from_their_seeds(golden: LLM) -> None:
    outputs = golden.generate(
        [PROMPT] * 8, [sampled(seed=seed) for seed in (1, 2, 1, 3)] + [sampled(temperature=3.0)] * 4
    )
    texts = [tuple(output.token_ids) for output in outputs]
    assert texts[0] == texts[2] and len(set(texts[:4])) == 3
    assert len(set(texts[4:])) == 4, "requests without a seed share one"


def test_a_seeded_text_does_not_depend_on_batch_chunks_or_planning(golden: LLM) -> None:
    params = [sampled(seed=seed) for seed in range(3)]
    expected = [golden.generate(prompt, one)[0].token_ids for prompt, one in zip(TOKENS_IN, params, strict=True)]
    assert [output.token_ids for output in golden.generate(TOKENS_IN, params)] == expected
    for options in ({"max_chunk_tokens": 7, "async_scheduling": False}, {"max_num_requests": 2, "num_blocks": 3}):
        with LLM(goldens.CHECKPOINT, precision="float32", **options) as llm:
            assert [output.token_ids for output in llm.generate(TOKENS_IN, params)] == expected


def test_results_come_in_the_order_of_the_prompts_whichever_ends_first(null: LLM) -> None:
    lengths = [40, 3, 17, 1, 29, 8, 2, 33]
    params = [sampled(max_tokens=length, seed=length) for length in lengths]
    outputs = null.generate([[length] for length in lengths], params)
    assert [(output.prompt_token_ids, len(output.token_ids)) for output in outputs] == [([n], n) for n in lengths]


def test_a_lower_priority_number_is_served_first() -> None:
    with LLM(goldens.CHECKPOINT, device="null", max_num_requests=1, num_blocks=64) as llm:
        entered, gate, executor, served = threading.Event(), threading.Event(), llm._client.core.executor, []
        execute = executor.execute

        def recorded(plan: StepPlan) -> StepResult:
            entered.set()
            gate.wait(PATIENCE)
            served.extend(setup.params.seed for setup in plan.setups)
            return execute(plan)

        executor.execute = recorded
        threads = []
        for number, priority in enumerate([0, 5, -5, 0]):
            params = sampled(max_tokens=2, seed=number)
            threads.append(threading.Thread(target=llm.generate, args=([1], params), kwargs={"priority": priority}))
            threads[-1].start()
            assert entered.wait(PATIENCE)  # the first holds the only slot before the others are known
            wait_until(lambda: llm.stats().num_running + llm.stats().num_waiting == len(threads))
        gate.set()
        for thread in threads:
            thread.join()
        assert served == [0, 2, 3, 1]


def test_more_prompts_than_the_queue_holds_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(goldens.CHECKPOINT, device="null", max_queue=8, max_num_requests=4) as llm:
        num_built, build = [0], type(llm._builder).build

        def counted(*args: Any, **options: Any) -> Any:
            num_built[0] += 1
            return build(*args, **options)

        monkeypatch.setattr(type(llm._builder), "build", counted)
        outputs = llm.generate([[1 + number % 600] for number in range(3000)], sampled(max_tokens=2, seed=1))
        assert [output.prompt_token_ids[0] for output in outputs] == [1 + number % 600 for number in range(3000)]
        assert all(len(output.token_ids) == 2 for output in outputs)
        assert num_built == [3000], "a prompt is encoded again while it waits for room in the queue"
        assert is_idle(llm) and not llm._ids._owners and not llm._client._routes


# -- several callers, several engines


def test_two_threads_get_their_own_answers(golden: LLM) -> None:
    alone = [[output.token_ids for output in golden.generate([prompt] * 3, sampled(seed=3))] for prompt in TOKENS_IN]
    found: list[Any] = [None] * 3

    def call(place: int) -> None:
        found[place] = [output.token_ids for output in golden.generate([TOKENS_IN[place]] * 3, sampled(seed=3))]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone and is_idle(golden)


def test_two_models_live_in_one_process(golden: LLM, nano: LLM) -> None:
    assert (golden.vocab_size, nano.vocab_size) == (640, 4096)
    expected = golden.generate(PROMPT, sampled(temperature=0.0))[0].token_ids
    stream = nano.stream("What is 12 + 30?", sampled(temperature=0.0, max_tokens=30))
    pieces = [next(stream)]
    assert golden.generate(PROMPT, sampled(temperature=0.0))[0].token_ids == expected == goldens.prompt(17).greedy[:10]
    pieces += stream
    assert joined(pieces) == whole(nano.generate("What is 12 + 30?", sampled(temperature=0.0, max_tokens=30))[0])


def test_a_waiting_stream_keeps_no_logits_of_other_callers(null: LLM) -> None:
    call = Call(null._client, null._ids)
    stream = null.stream([1, 2], LONG)
    with call:
        with held(null, after=5):
            next(stream)
            (subscription,) = null._client._routes.values()
        null.score([3] * 3000)
        outputs = [subscription.outputs.get_nowait() for _ in range(subscription.outputs.qsize())]
    assert outputs and not any(output.prompt_logits for output in outputs)
    stream.close()


# -- chat


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS = [
    ([{"role": "user", "content": "What is 12 + 30?"}], {}),
    ([{"role": "user", "content": "What is 12 + 30?"}], {"thinking": True}),
    ([{"role": "user", "content": "What is the weather in Paris?"}], {"tools": [TOOL]}),
    ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}], {"continue_final_message": True}),
]


@pytest.mark.parametrize(("messages", "options"), CHATS, ids=["plain", "thinking", "tools", "continued"])
def test_a_chat_stream_gives_what_chat_gives(nano: LLM, messages: list[Any], options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=1)
    output = nano.chat(messages, params, **options)[0]
    deltas = list(nano.stream_chat(messages, params, **options))
    assert joined(deltas) == whole(output)
    assert "".join(delta.answer.content for delta in deltas) == output.content
    assert "".join(delta.answer.reasoning for delta in deltas) == output.reasoning
    pieces = [call for delta in deltas for call in delta.answer.tool_calls]
    assert len(output.tool_calls) == ("tools" in options)
    for index, call in enumerate(output.tool_calls):
        assert "".join(piece.arguments for piece in pieces if piece.index == index) == call.arguments


def test_chat_on_the_bundled_model_answers_thinks_and_calls_tools(nano: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    plain, thinking, tools = (nano.chat(messages, params, **options)[0] for messages, options in CHATS[:3])
    assert plain.content == "42" and not plain.reasoning and plain.finish_reason == "stop"
    assert "</think>" not in thinking.reasoning and "So 42" in thinking.reasoning and thinking.content == "42"
    assert [(call.name, json.loads(call.arguments)) for call in tools.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]


def test_conversations_are_answered_side_by_side_and_a_bad_one_fails_alone(nano: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = nano.chat([CHATS[0][0], [{"content": "no role"}], CHATS[0][0]], params)
    assert [output.content for output in outputs] == ["42", "", "42"]
    assert outputs[1].finish_reason == "error" and "messages[0] is" in outputs[1].error


# -- the process


def process_state() -> dict[str, Any]:
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": signals,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "hooks": (sys.excepthook, threading.excepthook),
    }


def test_the_process_is_left_as_it_was() -> None:
    before, threads = process_state(), set(threading.enumerate())
    with LLM(goldens.CHECKPOINT, precision="float32", num_blocks=8) as llm:
        llm.generate([PROMPT, PROMPT], [sampled(), sampled(seed=1, top_p=0.5)])
        list(llm.stream(PROMPT, sampled()))
        llm.score(PROMPT)
        assert process_state() == before
    assert process_state() == before
    assert set(threading.enumerate()) <= threads


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    lines = "import goldens\nfrom deepinfer import LLM, SamplingParams\n" + code
    return subprocess.run(
        [sys.executable, "-c", lines], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize("work", ["llm.generate([1], P)", "stream = llm.stream([1], P); next(stream)"])
def test_a_program_that_does_not_close_its_engine_ends_quietly(work: str) -> None:
    done = run_python(
        f"llm = LLM(goldens.CHECKPOINT, num_blocks=8)\nP = SamplingParams(max_tokens=9)\n{work}\nprint('end')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_engine_that_nobody_holds_is_collected() -> None:
    threads = set(threading.enumerate())
    llm = LLM(goldens.CHECKPOINT, num_blocks=50)
    pools = weakref.ref(llm._client.core.executor.model.pools)
    next(llm.stream(PROMPT, LONG))  # left behind in the middle of an answer
    del llm
    gc.collect()
    assert set(threading.enumerate()) <= threads and pools() is None


def test_a_stream_that_the_collector_ends_in_an_engine_thread_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.call.MAX_LEAVE_SECONDS", 0.05)
    with LLM(goldens.CHECKPOINT, device="null", num_blocks=64) as llm:
        streams = [llm.stream([1], LONG), llm.stream([2], LONG)]
        for stream in streams:
            next(stream)
        schedule, core = llm._client.core.scheduler.schedule, llm._client.core

        def schedule_and_collect() -> Any:
            if streams:
                streams.pop().close()  # in the core's thread, inside its lock
            return schedule()

        core.scheduler.schedule = schedule_and_collect
        assert len(llm.generate([3], sampled())[0].token_ids) == 10
        assert not streams and is_idle(llm)


def test_a_stream_that_ends_while_the_caller_holds_the_engine_locks_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepinfer.call.MAX_LEAVE_SECONDS", 0.05)
    with LLM(goldens.CHECKPOINT, device="null", num_blocks=64) as llm:
        stream = llm.stream([1], LONG)
        next(stream)
        with llm._client._wake, llm._client.core._lock:
            stream.close()
        assert len(llm.generate([3], sampled())[0].token_ids) == 10
        assert is_idle(llm)


# -- ends of the engine


def call_in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def test_a_closed_engine_says_so_and_may_be_closed_again() -> None:
    llm = LLM(goldens.CHECKPOINT, device="null")
    llm.close()
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate([1]), lambda: llm.generate([[1], [2]]), lambda: list(llm.stream([1])),
        lambda: llm.score([1]), lambda: llm.chat([{"role": "user", "content": "x"}]),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(
            EngineDeadError, match=r"request 'request-\d' cannot run: the engine stopped .it was closed."
        ):
            use()
    assert llm.abort("x") is False and llm.stats().num_running == 0
    llm.close()


def test_closing_ends_running_streams_with_a_dead_engine() -> None:
    llm = LLM(goldens.CHECKPOINT, device="null")
    mine = llm.stream([1], LONG)
    with held(llm, after=5):
        next(mine)
        thread, failures = call_in_thread(lambda: llm.generate([[2]] * 10, LONG))
        wait_until(lambda: llm._client.num_requests == 11)
        closing, _ = call_in_thread(llm.close)
        wait_until(lambda: llm._client._is_closed)
    closing.join()
    thread.join()
    assert isinstance(failures[0], EngineDeadError) and "it was closed" in str(failures[0])
    with pytest.raises(EngineDeadError, match="it was closed"):
        list(mine)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_fails_ends_every_call_with_its_cause(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    threads = set(threading.enumerate())
    llm = LLM(goldens.CHECKPOINT, device="null", async_scheduling=is_async)
    executor, gate, num_steps = llm._client.core.executor, threading.Event(), []
    execute = executor.execute

    def fail_later(plan: Any) -> Any:
        num_steps.append(plan.step)
        if len(num_steps) > 50:
            raise RuntimeError("the device burns")
        assert gate.wait(PATIENCE)
        return execute(plan)

    executor.execute = fail_later
    calls = [call_in_thread(lambda: llm.generate([[1], [2]], LONG)) for _ in range(3)]
    calls += [call_in_thread(lambda: list(llm.stream([1], LONG))), call_in_thread(lambda: llm.score([1] * 20000))]
    wait_until(lambda: llm._client.num_requests == 8)
    gate.set()
    for thread, failures in calls[:4]:
        thread.join()
        assert isinstance(failures[0], EngineDeadError) and "the device burns" in str(failures[0])
        assert isinstance(failures[0].__cause__, RuntimeError)
    calls[4][0].join()
    with pytest.raises(EngineDeadError, match="cannot run: the engine stopped .RuntimeError.'the device burns'"):
        llm.generate([1])
    llm.close()
    assert set(threading.enumerate()) <= threads
    assert "the engine core failed" in caplog.text


def test_an_interrupted_generate_leaves_no_request_behind(golden: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    num_waits, wait = [0], Call.wait

    def interrupted(call: Call) -> Any:
        num_waits[0] += 1
        if num_waits[0] == 4:
            raise KeyboardInterrupt
        return wait(call)

    monkeypatch.setattr(Call, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        golden.generate([PROMPT] * 12, LONG)
    assert is_idle(golden) and not golden._ids._owners and not golden._client._routes
    assert golden.generate(PROMPT, sampled(temperature=0.0))[0].token_ids == goldens.prompt(17).greedy[:10]


def test_an_interrupt_right_behind_the_submission_leaves_no_request_behind(
    golden: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = golden._client.core
    add = core.add

    def interrupted(request: Any) -> None:
        add(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        golden.generate(PROMPT, LONG)
    monkeypatch.undo()
    assert is_idle(golden) and not golden._client._routes


def test_ctrl_c_interrupts_a_waiting_generate() -> None:
    code = """
import os, signal, threading, time
from deepinfer import call
call.MAX_LEAVE_SECONDS = 60.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
llm = LLM(goldens.CHECKPOINT, device="null", num_blocks=300)

def interrupt():
    while llm.stats().num_generated_tokens < 1000:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

try:
    threading.Thread(target=interrupt).start()
    while True:
        llm.generate([[1]] * 5, SamplingParams(max_tokens=5000, ignore_eos=True))
except KeyboardInterrupt:
    stats = llm.stats()
    print(stats.num_running + stats.num_waiting, stats.num_free_blocks)
"""
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 300\n", "")


def test_ids_are_unique_across_threads() -> None:
    ids, taken = RequestIds(), []

    def take() -> None:
        for _ in range(500):
            taken.append(ids.take())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 2000
