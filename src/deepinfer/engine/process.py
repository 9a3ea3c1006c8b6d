"""The engine's own process: loads the model, takes requests from the server and sends back each step.

It ignores the signals that end a server, since the server drains first; it ends when the server hangs up or dies.
"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty

from deepinfer import log
from deepinfer.engine.client import EngineClient, Subscription
from deepinfer.engine.launch import launch
from deepinfer.engine.wire import MAX_STEPS, Alive, Failed, Finish, Ready, Refused, Report, Start, Steps, Submit
from deepinfer.errors import DeepInferError, EngineDeadError, QueueFullError, RequestError
from deepinfer.messages import StepOutput
from deepinfer.structured.server import hang_up

logger = log.get(__name__)

ALIVE_SECONDS = 1.0


def main(fd: int) -> int:
    """Serve one server over the socket `fd`; returns the exit code."""
    connection = Connection(fd)
    start: Start = connection.recv()
    log.setup(start.log_level, is_json=start.log_json)
    try:
        engine = launch(start.config, start.folder, start.eos_ids)
    except DeepInferError as error:
        connection.send(Failed(str(error), is_refusal=True))
        return 2
    gc.collect()
    gc.freeze()  # what was loaded stays; the collector need not look at it again
    sender = _Sender(connection, engine.client)
    limits = engine.max_model_len, engine.vocab_size, engine.num_cache_tokens, engine.images
    sender.send(Ready(*limits, engine.client.stats()))
    sender.start()
    with suppress(EOFError, OSError):
        while True:
            _obey(connection.recv(), engine.client, sender)
    engine.client.close()
    return 0


def _obey(command: object, client: EngineClient, sender: _Sender) -> None:
    match command:
        case Submit(request):
            try:
                sender.subscription.submit(request)
            except EngineDeadError:
                return  # its cause is on the way
            except RequestError as error:
                sender.send(Refused(request.request_id, str(error), isinstance(error, QueueFullError)))
        case Finish(request_id, reason):
            client.finish(request_id, reason)
        case _:
            raise AssertionError(f"{command!r} is no command")


class _Outbox(Subscription):
    """Holds `MAX_STEPS` outputs; then the engine waits, so that a server that is stuck takes no memory here."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._room = threading.BoundedSemaphore(MAX_STEPS)

    def deliver(self, output: StepOutput | BaseException) -> None:
        if not isinstance(output, BaseException):
            self._room.acquire()
        super().deliver(output)

    def take(self) -> list[StepOutput]:
        """Everything that waits, at least one output."""
        taken = [self.get()]
        with suppress(Empty, EngineDeadError):
            while True:
                taken.append(self.get(timeout=0))
        self._room.release(len(taken))
        return taken


class _Sender:
    """Sends reports from several threads; outputs and signs of life from threads of its own.

    A server that is gone is no error.
    """

    def __init__(self, connection: Connection, client: EngineClient) -> None:
        self.subscription = _Outbox(client)
        self._connection, self._client = connection, client
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, name="deepinfer-sender", daemon=True).start()
        threading.Thread(target=self._tell_alive, name="deepinfer-alive", daemon=True).start()

    def send(self, report: Report) -> None:
        with self._lock, suppress(OSError):
            self._connection.send(report)

    def _run(self) -> None:
        try:
            while True:
                outputs = self.subscription.take()
                self.send(Steps(outputs, self._client.stats()))
        except EngineDeadError as error:
            self.send(Failed(str(error)))
            hang_up(self._connection)

    def _tell_alive(self) -> None:
        seen = 0
        while True:
            time.sleep(ALIVE_SECONDS)
            num_turns = self._client.num_turns
            if num_turns != seen or not self._client.num_requests:
                self.send(Alive())
            seen = num_turns
