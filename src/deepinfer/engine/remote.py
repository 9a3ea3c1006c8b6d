"""EngineProcess: an engine in a process of its own, as seen from the server. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

from deepinfer import log
from deepinfer.engine.wire import Command, Report, Start
from deepinfer.structured.server import hang_up

logger = log.get(__name__)

CLOSE_SECONDS = 5.0  # for the step in flight; then the process is killed
BOOT = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv.pop(1))
from deepinfer.engine import process
sys.exit(process.main(int(sys.argv[1])))
"""


class EngineProcess:
    """Starts the process; its reports and its end are told to callbacks, in a thread of this object.

    on_report: gets each report; while it runs no other one is read, and in the end the engine waits.
    on_end: gets the exit code (negative: the signal), after the last report.
    """

    def __init__(self, start: Start, on_report: Callable[[Report], None], on_end: Callable[[int], None]) -> None:
        self._on_report, self._on_end = on_report, on_end
        self._commands: SimpleQueue[Command | Start | None] = SimpleQueue()
        ours, theirs = socket.socketpair()
        with theirs:
            paths = json.dumps([path for path in sys.path if isinstance(path, str)])  # as imports do
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, paths, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._commands.put(start)
        self._writer = threading.Thread(target=self._write, name="deepinfer-commands", daemon=True)
        self._reader = threading.Thread(target=self._read, name="deepinfer-reports", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Pass a command on without waiting; dropped when the process has ended."""
        self._commands.put(command)

    def close(self) -> None:
        """End the process after the step in flight; kill it if that takes too long."""
        hang_up(self._connection)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        hang_up(self._connection)
        self._process.wait()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (command := self._commands.get()) is not None:
                self._connection.send(command)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):  # TypeError: closed in the middle of a read
            while True:
                self._on_report(self._connection.recv())
        self._commands.put(None)
        self._on_end(self._process.wait())
