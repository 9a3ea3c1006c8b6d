"""DeviceThread: carries out plans one after another, beside the thread that plans.

An engine has one for its steps and one for the images that are encoded meanwhile.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

Plan = TypeVar("Plan")
Result = TypeVar("Result")
PlanIn = TypeVar("PlanIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Executor(Protocol[PlanIn, ResultOut]):
    """What carries out plans, in the order it gets them."""

    def execute(self, plan: PlanIn) -> ResultOut:
        """Run one plan to its end."""
        ...


class DeviceThread(Generic[Plan, Result]):
    """A daemon thread, so that it lives until the interpreter's exit handlers have closed the engine.

    (A ThreadPoolExecutor refuses work before those run, in the middle of answers.)
    """

    def __init__(self, executor: Executor[Plan, Result], name: str = "deepinfer-device") -> None:
        self._executor = executor
        self._waiting: SimpleQueue[tuple[Plan, Future[Result]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> Future[Result]:
        """Hand over the next plan."""
        future: Future[Result] = Future()
        self._waiting.put((plan, future))
        return future

    def close(self) -> None:
        """Wait for the plans that were handed over and not cancelled, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            plan, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._executor.execute(plan))
            except BaseException as error:
                future.set_exception(error)
