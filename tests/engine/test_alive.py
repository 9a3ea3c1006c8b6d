"""Signs of life of an engine process: none while it has requests and does nothing with them."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from deepinfer.engine import process
from deepinfer.engine.client import EngineClient
from deepinfer.engine.wire import Alive
from fake_core import FakeExecutor, make_core, request
from waiting import PATIENCE, wait_until


class Engine:
    """What an engine process runs, but for its clock: the thread that tells signs of life waits for `looks`."""

    def __init__(self, client: EngineClient, executor: FakeExecutor, ours: Connection, theirs: Connection) -> None:
        self.client, self.executor, self._connection = client, executor, ours
        self._go_on: SimpleQueue[None] = SimpleQueue()
        self._sleeps: SimpleQueue[float] = SimpleQueue()
        self.sender = process._Sender(theirs, client)

    def sleep(self, seconds: float) -> None:
        """In place of time.sleep."""
        self._sleeps.put(seconds)
        self._go_on.get()

    def start(self) -> None:
        self.sender.start()
        assert self._sleeps.get(timeout=PATIENCE) == process.ALIVE_SECONDS

    def look(self) -> bool:
        """Whether it told a sign of life at its next look at the engine."""
        self._go_on.put(None)
        self._sleeps.get(timeout=PATIENCE)
        told = []
        while self._connection.poll():
            told.append(self._connection.recv())
        return Alive() in told


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    core, executor = make_core()
    with EngineClient(core, max_queue=8) as client:
        one = Engine(client, executor, *Pipe())
        monkeypatch.setattr(process, "time", SimpleNamespace(sleep=one.sleep))
        one.start()
        yield one
        executor.gate.set()


def test_an_idle_engine_is_alive(engine: Engine) -> None:
    assert [engine.look() for _ in range(3)] == [True] * 3


def test_a_step_that_does_not_end_is_no_life(engine: Engine) -> None:
    engine.executor.gate.clear()
    engine.sender.subscription.submit(request("a"))
    wait_until(lambda: engine.client.num_turns == 2)  # two steps are planned, and the first does not end
    assert [engine.look() for _ in range(3)] == [True, False, False]
    engine.executor.gate.set()
    wait_until(lambda: engine.client.num_turns > 2)
    assert engine.look()
