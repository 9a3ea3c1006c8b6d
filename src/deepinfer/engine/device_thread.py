"""DeviceThread: carries out plans one after another, beside the thread that plans."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from deepinfer.messages import StepPlan, StepResult


class Executor(Protocol):
    """What carries out plans, in the order it gets them."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end."""
        ...


class DeviceThread:
    """A daemon thread, so that it lives until the interpreter's exit handlers have closed the engine.

    (A ThreadPoolExecutor refuses work before those run, in the middle of answers.)
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deepinfer-device", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Hand over the next plan."""
        future: Future[StepResult] = Future()
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
