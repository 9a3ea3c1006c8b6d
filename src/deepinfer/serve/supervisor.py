"""Supervisor: keeps an engine process running, and starts another when one ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from deepinfer import log
from deepinfer.engine.remote import EngineProcess
from deepinfer.engine.wire import MAX_STEPS, Failed, Ready, Report, Start
from deepinfer.errors import ConfigError, EngineDeadError
from deepinfer.serve.link import Link

logger = log.get(__name__)

FIRST_DELAY, MAX_DELAY = 0.25, 30.0  # seconds before another start; doubled each time
HEALTHY_SECONDS = 60.0  # after which an engine counts as sound, and the delay begins anew


class Supervisor:
    """Of one link; its methods belong to the event loop.

    num_restarts: engines that were started after the first one.
    """

    def __init__(self, start: Start, link: Link) -> None:
        self._start, self._link = start, link
        self._process: EngineProcess | None = None
        self._room = threading.BoundedSemaphore(MAX_STEPS)  # of reports between reader thread and event loop
        self._first: asyncio.Future[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._delay = FIRST_DELAY
        self._ready_since: float | None = None
        self._cause = ""
        self._is_closing = False
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the engine process, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises ConfigError for options, a model or weights that cannot be run, EngineDeadError for a crash.
        """
        self._first = asyncio.get_running_loop().create_future()
        self._launch()
        await self._first

    async def close(self) -> None:
        """End the engine after the step in flight."""
        self._is_closing = True
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def kill(self) -> None:
        """End the engine at once."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()

    def _launch(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(function: Callable[..., None], *values: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function, *values)

        def on_report(report: Report) -> None:
            self._room.acquire()
            tell(self._take, report)

        self._process = EngineProcess(self._start, on_report, lambda code: tell(self._ended, code))

    def _take(self, report: Report) -> None:
        self._room.release()
        match report:
            case Ready():
                assert self._process is not None
                self._ready_since = time.monotonic()
                self._link.attach(report, self._process.send)
                if self._first is not None and not self._first.done():
                    self._first.set_result(None)
                logger.info("the engine is ready (process %d)", self._process.pid)
            case Failed():
                self._cause = report.error
                if report.is_refusal and self._first is not None and not self._first.done():
                    self._first.set_exception(ConfigError(report.error))
            case _:
                self._link.take(report)

    def _ended(self, code: int) -> None:
        """The process is gone."""
        cause = self._cause or (f"signal {-code}" if code < 0 else f"exit code {code}")
        self._process, self._cause = None, ""
        self._link.detach(f"the engine process ended ({cause})")
        if self._first is not None and not self._first.done():
            self._first.set_exception(EngineDeadError(f"the engine did not start ({cause})"))
        if self._is_closing or self._ready_since is None and self.num_restarts == 0:
            return
        if self._ready_since is not None and time.monotonic() - self._ready_since > HEALTHY_SECONDS:
            self._delay = FIRST_DELAY
        self._ready_since = None
        logger.error("the engine process ended (%s); it is started again in %.2f s", cause, self._delay)
        self.num_restarts += 1
        self._restart = asyncio.get_running_loop().call_later(self._delay, self._launch)
        self._delay = min(2 * self._delay, MAX_DELAY)
