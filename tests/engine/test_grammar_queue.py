"""Requests that wait for their grammar, with a server whose futures the test holds."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from deepinfer.engine.client import EngineClient
from deepinfer.engine.grammar_queue import GrammarQueue
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar
from fake_core import make_core, request
from waiting import PATIENCE

COMPILED = CompiledGrammar(1, b"")


class FakeServer:
    def __init__(self) -> None:
        self.futures: list[Future[CompiledGrammar]] = []
        self.is_closed = False

    def compile(self, grammar: object) -> Future[CompiledGrammar]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.is_closed = True


def constrained(name: str) -> GenerateRequest:
    params = SamplingParams(structured_outputs={"regex": "a"}, max_tokens=5, seed=1)
    return GenerateRequest(name, np.array([3, 4], np.int32), params, 0.0)


def test_a_request_is_ready_when_its_grammar_is() -> None:
    server, woken = FakeServer(), []
    queue = GrammarQueue(server, lambda: woken.append(1), 2)
    queue.add(constrained("a"))
    queue.add(constrained("b"))
    assert not queue.has_work() and list(queue.ready()) == []
    server.futures[1].set_result(COMPILED)
    assert woken == [1] and queue.has_work()
    (ready,) = queue.ready()
    assert (ready.request_id, ready.grammar) == ("b", COMPILED)
    queue.remove("b")
    assert not queue.has_work()


def test_a_refused_grammar_ends_its_request() -> None:
    server = FakeServer()
    queue = GrammarQueue(server, lambda: None, 2)
    queue.add(constrained("a"))
    server.futures[0].set_exception(RequestError("the regex is bad"))
    assert list(queue.ready()) == []
    (ended,) = queue.take_finished()
    assert (ended.reason, ended.error, ended.times.scheduled) == (
        "error",
        "request 'a' is refused: the regex is bad",
        None,
    )
    assert not queue.has_work()


def test_a_grammar_that_comes_after_its_request_was_ended_is_not_that_of_the_next_one_with_its_id() -> None:
    server, woken = FakeServer(), []
    queue = GrammarQueue(server, lambda: woken.append(1), 2)
    queue.add(constrained("a"))
    assert queue.finish("a", "abort") and len(queue.take_finished()) == 1
    queue.add(constrained("a"))
    server.futures[0].set_result(CompiledGrammar(7, b""))
    assert list(queue.ready()) == [] and not queue.has_work()
    server.futures[1].set_result(COMPILED)
    assert [one.grammar for one in queue.ready()] == [COMPILED]


def test_no_more_than_some_requests_wait_whatever_their_grammars() -> None:
    server = FakeServer()
    queue = GrammarQueue(server, lambda: None, 2)
    queue.add(constrained("a"))
    queue.add(constrained("b"))
    with pytest.raises(QueueFullError, match="request 'c' is refused: 2 requests with grammars wait already"):
        queue.add(constrained("c"))
    assert len(server.futures) == 2 and queue.finish("a", "abort")
    queue.add(constrained("c"))


def test_an_engine_without_grammars_refuses() -> None:
    with pytest.raises(RequestError, match="request 'a' has a grammar, but this engine runs without"):
        GrammarQueue(None, lambda: None, 2).add(constrained("a"))


def test_other_requests_run_while_one_waits_and_it_can_be_aborted() -> None:
    core, _ = make_core()
    server = FakeServer()
    with EngineClient(core, server, max_queue=8) as client:
        caller = client.subscribe()
        caller.submit(constrained("waits"))
        caller.submit(request("runs"))
        ends = []
        while not ends:
            ends += [ended.request_id for ended in caller.get(timeout=PATIENCE).finished]
        assert ends == ["runs"] and client.is_routed("waits")
        assert client.abort("waits") and not client.abort("waits")
        (ended,) = caller.get(timeout=PATIENCE).finished
        assert (ended.request_id, ended.reason) == ("waits", "abort")
        assert not client.is_routed("waits")
    assert server.is_closed


def test_what_the_scheduler_refuses_ends_with_its_error() -> None:
    core, _ = make_core()
    server = FakeServer()
    with EngineClient(core, server, max_queue=8) as client:
        caller = client.subscribe()
        long = constrained("long")
        params = SamplingParams(structured_outputs={"regex": "a"}, max_tokens=1000, seed=1)
        caller.submit(GenerateRequest("long", long.token_ids, params, 0.0))
        server.futures[0].set_result(COMPILED)
        (ended,) = caller.get(timeout=PATIENCE).finished
        assert ended.reason == "error" and "max_tokens is 1000" in ended.error


def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core()
    add, refusals = core.add, iter([True, True, False])

    def full_at_first(request: GenerateRequest) -> None:
        if next(refusals, False):
            raise QueueFullError("full")
        add(request)

    monkeypatch.setattr(core, "add", full_at_first)
    server = FakeServer()
    with EngineClient(core, server, max_queue=8) as client:
        caller = client.subscribe()
        caller.submit(constrained("a"))
        server.futures[0].set_result(COMPILED)
        ends = []
        while not ends:
            ends += caller.get(timeout=PATIENCE).finished
        assert ends[0].reason == "length"
