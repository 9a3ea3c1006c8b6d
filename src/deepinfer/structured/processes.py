"""The helper processes: native grammar code runs in them, so that its crash or hang is not the engine's.

    engine --+-- fork server      loads library and vocabulary once, then only forks
             +-- a compiler       one per grammar, with limits on time and memory; ends with its answer
             `-- the matcher      all answers under a grammar: takes tokens, fills masks

A child that runs out of time is ended by a timer of the kernel's, so no hang outlives its limit. All
of them end when the engine's end of their socket closes. Engine and helpers talk over
`multiprocessing.connection`; the masks lie in memory that both sides map.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.structured.grammar import Grammar
from deepinfer.structured.library import GrammarLibrary
from deepinfer.structured.matching import MatcherState, Step
from deepinfer.structured.server import COMPILE, COMPILE_SECONDS, COMPILE_WALL_SECONDS
from deepinfer.structured.xgrammar_library import XGrammar

COMPILE_BYTES = 2**29  # that compiling may take beyond what the vocabulary takes
MATCHER_BYTES = 2**32
MAX_COMPILED_BYTES = 2**26
PROBE_TOKENS = 32


def main() -> None:
    """Be the fork server. Arguments: socket, model folder, vocabulary size, end ids as JSON."""
    fd, folder, vocab_size, end_ids = sys.argv[1:]
    control = socket.socket(fileno=int(fd))
    sys.modules["torch"] = None  # type: ignore[assignment]  # the library's bindings would load it if they could
    try:
        library = XGrammar(Tokenizer(Path(folder)).token_bytes(), int(vocab_size), json.loads(end_ids))
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}".encode()[:1000])
        return
    gc.freeze()  # what is there now is not to be gone through again, nor copied by the children that would do it
    control.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        role, fds, _, _ = socket.recv_fds(control, 16, 2)
        if not role:
            return
        if os.fork() == 0:
            control.close()
            _serve(role, library, fds)
        for descriptor in fds:
            os.close(descriptor)


def _serve(role: bytes, library: GrammarLibrary, fds: list[int]) -> None:
    """Do one child's work, then end without the exit handlers of the parent."""
    try:
        connection = Connection(fds[0])
        if role == COMPILE:
            compile_one(library, connection)
        else:
            match(library, connection, fds[1])
    except EOFError:
        pass
    finally:
        os._exit(0)


def compile_one(library: GrammarLibrary, connection: Connection) -> None:
    """Answer with the compiled grammar as bytes, or with the text of a refusal."""
    grammar: Grammar = connection.recv()
    _limit_memory(COMPILE_BYTES)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # SIGPROF, which ends the process
    signal.setitimer(signal.ITIMER_REAL, COMPILE_WALL_SECONDS)
    answer: bytes | str
    try:
        answer = library.compile(grammar)
        _probe(library, answer)
        if len(answer) > MAX_COMPILED_BYTES:
            answer = f"{grammar.kind} takes {len(answer)} bytes when compiled; at most {MAX_COMPILED_BYTES} are taken"
    except RequestError as error:
        answer = str(error)
    except (MemoryError, RecursionError) as error:
        answer = f"{grammar.kind} is too large to compile ({type(error).__name__}); make it simpler"
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    connection.send(answer)


def _probe(library: GrammarLibrary, data: bytes) -> None:
    """Follow the grammar for some tokens, so that masks too slow to fill run into the time limit here."""
    random = np.random.default_rng(0)
    matcher = library.matcher(library.load(data))
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    for _ in range(PROBE_TOKENS):
        matcher.fill(masks, 0)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.accept(int(random.choice(allowed))) or matcher.is_ended:
            return


def match(library: GrammarLibrary, connection: Connection, masks_fd: int) -> None:
    """Carry out steps until the engine closes its end. See `matching.MatcherState`."""
    _limit_memory(MATCHER_BYTES)
    state = MatcherState(library, np.frombuffer(mmap.mmap(masks_fd, 0), dtype=np.int32))
    while True:
        step: Step = connection.recv()
        connection.send((step.number, state.run(step)))


def _limit_memory(extra: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
