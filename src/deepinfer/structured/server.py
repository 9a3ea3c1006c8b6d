"""GrammarServer: compiles grammars and opens matchers, in helper processes that it starts when first needed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from deepinfer import log
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.structured.grammar import CompiledGrammar, Grammar

logger = log.get(__name__)

COMPILE, MATCH = b"compile", b"match"  # what the fork server is asked for
COMPILE_SECONDS = 1.5  # of processor time for one grammar, so that a busy machine does not refuse sound ones
COMPILE_WALL_SECONDS = 15.0  # for one that sleeps, or a machine that is very busy
MAX_CACHED = 256  # grammars, refused ones too
MAX_CACHED_BYTES = 2**28
MAX_WAITING = 256
NUM_COMPILERS = 2
START_SECONDS = 60.0
BOOT = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's; helpers end with it
sys.path[:] = json.loads(sys.argv.pop(1))
from deepinfer.structured import processes
processes.main()
"""


class GrammarServer:
    """Of one engine. Thread-safe.

    folder: of the model; its tokenizer gives the vocabulary. vocab_size: the model's.
    end_ids: tokens that end an answer.
    """

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)
        self._folder = folder
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of the cache
        self._starting = threading.Lock()  # of the fork server
        self._control: socket.socket | None = None
        self._matcher: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="deepinfer-grammar")

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, or a RequestError, at most some seconds later; from the cache at once.

        Raises QueueFullError when too many grammars wait.
        """
        with self._lock:
            future = self._cache.get(grammar)
            if future is None:
                if sum(not other.done() for other in self._cache.values()) >= MAX_WAITING:
                    raise QueueFullError(f"{MAX_WAITING} grammars wait to be compiled already; try again later")
                future = self._cache[grammar] = self._threads.submit(self._compile, grammar)
            self._cache.move_to_end(grammar)
            self._trim()
            return future

    def connect(self, masks_fd: int) -> Connection:
        """A new matcher process that writes its masks into the file `masks_fd`.

        It ends when the connection is closed, by the caller or by `close`. Raises RequestError.
        """
        self._matcher = self._ask(MATCH, masks_fd)
        return self._matcher

    def close(self) -> None:
        """End the helper processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._matcher is not None:
            hang_up(self._matcher)
        with self._starting:
            self._is_closed = True
            self._end_process()

    def _trim(self) -> None:
        done = [(key, value) for key, value in self._cache.items() if value.done()]
        sizes = {key: 0 if value.exception() else len(value.result().data) for key, value in done}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if len(self._cache) <= MAX_CACHED and total <= MAX_CACHED_BYTES:
                break
            del self._cache[key]
            total -= size

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            answer = self._answer(grammar)
        except RequestError:  # nothing that the grammar must be to blame for: it may do better next time
            with self._lock:
                self._cache.pop(grammar, None)
            raise
        if isinstance(answer, str):
            raise RequestError(answer)
        return CompiledGrammar(next(self._numbers), answer)

    def _answer(self, grammar: Grammar) -> bytes | str:
        """What a compiler process says of the grammar. Raises RequestError when it ends without a word."""
        with self._ask(COMPILE) as connection:
            started = time.monotonic()
            try:
                connection.send(grammar)
                if connection.poll(2 * COMPILE_WALL_SECONDS):
                    answer: bytes | str = connection.recv()
                    return answer
            except (EOFError, OSError):
                pass
        is_late = time.monotonic() - started >= COMPILE_SECONDS
        cause = f"takes more than {COMPILE_SECONDS} s" if is_late else "needs too much memory or crashes the compiler"
        raise RequestError(f"{grammar.kind} cannot be compiled: it {cause}; make it simpler")

    def _ask(self, role: bytes, *fds: int) -> Connection:
        """A connection to a new child of the fork server. Raises RequestError."""
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                message = [role], [theirs.fileno(), *fds]
                control = self._started()
                try:
                    socket.send_fds(control, *message)
                except OSError:  # it was ended from outside: start another
                    self._forget(control)
                    socket.send_fds(self._started(), *message)
                return Connection(ours.detach())
        except OSError as error:
            raise RequestError(f"the grammar helper process cannot be reached ({error})") from None

    def _forget(self, control: socket.socket) -> None:
        with self._starting:
            if self._control is control:
                self._end_process()

    def _end_process(self) -> None:
        """`_starting` is held."""
        if self._control is not None and self._process is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._process.wait()
        self._control = None

    def _started(self) -> socket.socket:
        with self._starting:
            if self._is_closed:
                raise RequestError("structured outputs are not available: the engine was closed")
            if self._control is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                arguments = (theirs.fileno(), self._folder, self.vocab_size, json.dumps(self.end_ids))
                paths = json.dumps([path for path in sys.path if isinstance(path, str)])  # as imports do
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", BOOT, paths, *map(str, arguments)],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                    )
                ours.settimeout(START_SECONDS)
                problem = _first_word(ours)
                if problem:
                    ours.close()
                    self._process.kill()
                    self._process.wait()
                    raise RequestError(f"structured outputs are not available: {problem}")
                self._control = ours
            return self._control


def hang_up(connection: Connection) -> None:
    """Close a connection so that the helper ends, even if a process that the user has forked holds a copy of it."""
    if not connection.closed:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
        connection.close()


def _first_word(control: socket.socket) -> str:
    """What the fork server says when it is ready: nothing, or what is in the way."""
    try:
        word = control.recv(4096)
    except OSError as error:
        return str(error)
    return "" if word == b"ready" else word.decode() or "the helper process ended at its start"
