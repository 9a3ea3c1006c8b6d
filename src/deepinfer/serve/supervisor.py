"""Supervisor: keeps an engine process running, and starts another when one ends by itself or is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from deepinfer import log
from deepinfer.engine.remote import EngineProcess
from deepinfer.engine.wire import MAX_STEPS, Alive, Failed, Ready, Report, Start
from deepinfer.errors import ConfigError, EngineDeadError
from deepinfer.serve.link import Link

logger = log.get(__name__)

FIRST_DELAY, MAX_DELAY = 0.25, 30.0  # seconds before another start; doubled each time
HEALTHY_SECONDS = 60.0  # after which an engine counts as sound, and the delay begins anew
NUM_LOOKS = 5  # in a row at an engine that tells nothing, before it is ended: a server that slept itself looks once


class Supervisor:
    """Of one link; its methods belong to the event loop.

    stuck_seconds: an engine that tells nothing for so long is killed. num_restarts: engines that were started
    after the first one.
    """

    def __init__(self, start: Start, link: Link, stuck_seconds: float) -> None:
        self._start, self._link, self._stuck_seconds = start, link, stuck_seconds
        self._has_told = True  # since the last look
        self._watcher: asyncio.Task[None] | None = None
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
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the engine after the step in flight."""
        self._is_closing = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def kill(self) -> None:
        """End the engine at once."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()

    async def _watch(self) -> None:
        num_silent = 0
        while True:
            await asyncio.sleep(self._stuck_seconds / NUM_LOOKS)
            num_silent = num_silent + 1 if self._link.is_up and not self._has_told else 0
            self._has_told = False
            if num_silent == NUM_LOOKS and self._process is not None:
                self._cause = f"it did nothing for {self._stuck_seconds:g} s"
                self._link.detach(f"the engine is stuck ({self._cause})")  # at once: the process may be slow to die
                await asyncio.to_thread(self._process.kill)

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
        self._has_told = True
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
            case Alive():
                pass
            case _ if self._link.is_up:  # else it was given up
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
