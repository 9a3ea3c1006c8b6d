"""EngineClient: routes, refusals and ends, over a core with a fake executor."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from queue import Empty

import pytest

from deepinfer.engine.client import EngineClient, Subscription
from deepinfer.errors import EngineDeadError, RequestError
from fake_core import NUM_BLOCKS, FakeExecutor, expected, make_core, request
from waiting import PATIENCE, wait_until


@pytest.fixture
def engine() -> Iterator[tuple[EngineClient, FakeExecutor]]:
    core, executor = make_core()
    with EngineClient(core, max_queue=8) as client:
        yield client, executor
        executor.gate.set()


def read(subscription: Subscription, name: str) -> tuple[list[int], str]:
    """The tokens of a request up to its end, and the reason of that."""
    tokens: list[int] = []
    while True:
        output = subscription.get(timeout=PATIENCE)
        lines = zip(output.request_ids, output.token_ids.tolist(), strict=True)
        tokens += [token for owner, token in lines if owner == name]
        for ended in output.finished:
            if ended.request_id == name:
                return tokens, ended.reason


def test_callers_get_the_outputs_that_touch_them(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, executor = engine
    executor.gate.clear()
    callers = [client.subscribe() for _ in range(3)]
    for number, caller in enumerate(callers):
        caller.submit(request(f"r{number}", 3 + number))
    executor.gate.set()
    for number, caller in enumerate(callers):
        assert read(caller, f"r{number}") == (expected(3 + number), "length")
        assert not client.is_routed(f"r{number}")
        with pytest.raises(Empty):
            caller.get(timeout=0)
    assert client.stats().num_free_blocks == NUM_BLOCKS


def test_a_request_has_a_route_until_its_end_is_in_the_queue(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, executor = engine
    executor.gate.clear()
    caller = client.subscribe()
    caller.submit(request("a"))
    wait_until(lambda: client.stats().num_steps)  # so it ends with the step that the gate holds, not before
    assert client.is_routed("a") and not client.is_routed("b")
    with pytest.raises(RequestError, match="request id 'a' is in use; give another one"):
        client.subscribe().submit(request("a"))
    assert client.finish("a", "stop") and client.is_routed("a")
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        caller.submit(request("a"))
    executor.gate.set()
    assert read(caller, "a") == ([], "stop") and not client.is_routed("a")
    caller.submit(request("a"))
    assert read(caller, "a") == (expected(), "length")


def test_a_refused_request_leaves_no_route(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, _ = engine
    caller = client.subscribe()
    with pytest.raises(RequestError, match="max_tokens is 100 but prompt"):
        caller.submit(request("a", 100))
    assert not client.is_routed("a")
    caller.submit(request("a"))
    assert read(caller, "a") == (expected(), "length")


def test_an_abandoned_request_ends_with_the_next_step(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, executor = engine
    executor.gate.clear()
    caller = client.subscribe()
    caller.submit(request("a", 50))
    client.abandon("a", caller)
    executor.gate.set()
    tokens, reason = read(caller, "a")
    assert reason == "abort" and len(tokens) <= 2
    assert client.stats().num_free_blocks == NUM_BLOCKS


def test_a_late_abandon_does_not_end_the_next_request_of_that_id(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, _ = engine
    first, second = client.subscribe(), client.subscribe()
    first.submit(request("a"))
    read(first, "a")
    client.abandon("a", first)  # it has ended, and nobody looked yet
    second.submit(request("a", 20))
    assert read(second, "a") == (expected(20), "length")


def test_the_client_holds_no_subscription_whose_requests_have_ended(engine: tuple[EngineClient, FakeExecutor]) -> None:
    client, _ = engine
    caller = client.subscribe()
    caller.submit(request("a"))
    read(caller, "a")
    reference = weakref.ref(caller)
    del caller
    client.subscribe().submit(request("b", 1))  # the core moves on to other work
    wait_until(lambda: not client.is_routed("b"))
    gc.collect()
    assert reference() is None


def test_a_failure_reaches_all_who_wait_and_all_who_come_later() -> None:
    core, executor = make_core()
    client = EngineClient(core, max_queue=8)
    executor.fails_at = 3
    executor.gate.clear()
    callers = [client.subscribe() for _ in range(3)]
    for number, caller in enumerate(callers):
        caller.submit(request(f"r{number}", 9))
    executor.gate.set()
    for caller in callers:
        for _ in range(2):  # every later call fails too
            with pytest.raises(EngineDeadError, match="the engine stopped: RuntimeError.'the device burns'") as caught:
                while True:
                    caller.get(timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="request 'x' cannot run: the engine stopped .RuntimeError"):
        client.subscribe().submit(request("x"))
    client.close()
    assert not client._thread.is_alive() and not core._device._thread.is_alive()


def test_closing_twice_from_two_threads_ends_both_threads_and_tells_who_waits() -> None:
    core, executor = make_core()
    client = EngineClient(core, max_queue=8)
    caller = client.subscribe()
    executor.gate.clear()
    caller.submit(request("a", 60))
    closing = [threading.Thread(target=client.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    wait_until(lambda: client._is_closed)
    executor.gate.set()
    for thread in closing:
        thread.join()
    assert not client._thread.is_alive() and not core._device._thread.is_alive()
    with pytest.raises(EngineDeadError, match="it was closed"):
        while True:
            caller.get(timeout=PATIENCE)
    with pytest.raises(EngineDeadError, match="cannot run: the engine stopped .it was closed."):
        caller.submit(request("b"))
