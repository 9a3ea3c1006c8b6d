"""DeviceThread: carries out plans one after another, beside the thread that plans.

An engine has one for its steps and one for the images that are encoded meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from deepinfer.errors import EngineDeadError

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

    (A ThreadPoolExecutor refuses work before those run, in the middle of answers.) One other thread hands plans over
    and takes their results.

    on_done: called in this thread whenever a result is there.
    """

    def __init__(
        self,
        executor: Executor[Plan, Result],
        name: str = "deepinfer-device",
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor, self._on_done = executor, on_done
        self._plans: SimpleQueue[Plan | None] = SimpleQueue()
        self._results: SimpleQueue[Result | _Failure] = SimpleQueue()
        self.num_in_flight = 0  # plans whose result was not taken
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        """Hand over the next plan."""
        self.num_in_flight += 1
        self._plans.put(plan)

    def has_result(self) -> bool:
        """Whether `result` would not wait."""
        return not self._results.empty()

    def result(self) -> Result:
        """What the oldest plan in flight gave, once it is there; raises what it raised."""
        result = self._results.get()
        self.num_in_flight -= 1
        if isinstance(result, _Failure):
            raise result.error
        return result

    def close(self) -> None:
        """Wait for the plan that is being carried out, drop those behind it, and end the thread.

        `result` raises EngineDeadError for a plan that was dropped.
        """
        self._is_closing = True
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                if self._is_closing:
                    raise EngineDeadError("the engine was closed before this plan's turn")
                self._results.put(self._executor.execute(plan))
            except BaseException as error:
                self._results.put(_Failure(error))
            self._on_done()


@dataclass(frozen=True)
class _Failure:
    """What a plan raised."""

    error: BaseException
