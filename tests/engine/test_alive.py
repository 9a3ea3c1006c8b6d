"""Signs of life of an engine process: none while it has requests and does nothing with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from deepinfer.engine import process
from deepinfer.engine.client import EngineClient
from deepinfer.engine.wire import Alive, Steps
from fake_core import FakeExecutor, make_core, request


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[process._Sender, FakeExecutor, Connection]]:
    monkeypatch.setattr(process, "ALIVE_SECONDS", 0.02)
    core, executor = make_core()
    ours, theirs = Pipe()
    with EngineClient(core, max_queue=8) as client:
        sender = process._Sender(theirs, client)
        sender.start()
        yield sender, executor, ours
        executor.gate.set()


def told(connection: Connection, seconds: float) -> list[object]:
    """All reports within so many seconds."""
    reports, deadline = [], time.monotonic() + seconds
    while connection.poll(max(0.0, deadline - time.monotonic())):
        reports.append(connection.recv())
    return reports


def test_an_idle_engine_is_alive(engine: tuple[process._Sender, FakeExecutor, Connection]) -> None:
    assert told(engine[2], 0.5).count(Alive()) > 2


def test_a_step_that_does_not_end_is_no_life(engine: tuple[process._Sender, FakeExecutor, Connection]) -> None:
    sender, executor, connection = engine
    executor.gate.clear()
    sender.subscription.submit(request("a"))
    told(connection, 0.5)
    assert told(connection, 0.5) == []
    executor.gate.set()
    reports = told(connection, 0.5)
    assert Alive() in reports and any(isinstance(report, Steps) for report in reports)
