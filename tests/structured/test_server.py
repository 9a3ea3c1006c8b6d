"""Compiling in helper processes: cached, bounded in time and memory, and never the engine's end."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

import deepinfer
from deepinfer.errors import RequestError
from deepinfer.structured.grammar import Grammar, read_structured_outputs
from deepinfer.structured.server import GrammarServer, hang_up
from hostile_grammars import HEAVY, HOSTILE, WIDE
from waiting import PATIENCE, is_running, wait_until

NANO = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"
# The limit is 1.5 s of processor time, so below 2 s on an idle machine (`benchmarks/structured/hostile.py`).
# Tests may have to share theirs with others.
MAX_SECONDS = 60
IS_SLOW = "deepinfer.structured.server.COMPILE_SECONDS"  # after which a compiler that ends is said to have been slow


def children(process_id):
    return [int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def compiled(server, grammar):
    """The data or the refusal, and the seconds that it took."""
    started = time.monotonic()
    future = server.compile(grammar)
    wait([future], timeout=MAX_SECONDS)
    refusal = future.exception(timeout=0)
    return refusal or future.result().data, time.monotonic() - started


@pytest.fixture(scope="module", autouse=True)
def warm(server):
    assert isinstance(compiled(server, Grammar("regex", "warm"))[0], bytes)


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.text[:40])
def test_hostile_grammars_are_refused_soon(server, grammar):
    result, seconds = compiled(server, grammar)
    assert isinstance(result, RequestError) and str(result)
    assert seconds < MAX_SECONDS


@pytest.mark.parametrize("grammar", HEAVY, ids=lambda grammar: grammar.text[:40])
def test_heavy_grammars_stay_within_the_limits(server, grammar):
    result, seconds = compiled(server, grammar)
    assert isinstance(result, RequestError | bytes)
    assert seconds < MAX_SECONDS
    assert isinstance(compiled(server, Grammar("regex", "[0-9]{3}"))[0], bytes)


def test_a_compiler_that_ends_early_is_a_refusal(server, monkeypatch):
    wait_until(lambda: not children(server._process.pid))  # the last test's compiler, which has answered already
    ask = server._ask

    def ask_one_that_ends(role):
        connection = ask(role)
        wait_until(lambda: children(server._process.pid))
        os.kill(children(server._process.pid)[0], signal.SIGKILL)
        return connection

    monkeypatch.setattr(server, "_ask", ask_one_that_ends)
    monkeypatch.setattr(IS_SLOW, PATIENCE)
    future = server.compile(Grammar("ebnf", WIDE.replace("24999", "x")))
    with pytest.raises(RequestError, match="ebnf cannot be compiled: it needs too much memory or crashes the compiler"):
        future.result(timeout=PATIENCE)


def test_equal_grammars_are_compiled_once_and_refusals_are_remembered(server):
    for form in ({"regex": "[a-c]{2}"}, {"regex": "["}):
        first, again = (server.compile(read_structured_outputs(form)) for _ in range(2))
        assert first is again


def test_the_cache_is_bounded(server, monkeypatch):
    monkeypatch.setattr("deepinfer.structured.server.MAX_CACHED", 3)
    for number in range(8):
        wait([server.compile(Grammar("regex", f"bounded{number}"))], timeout=PATIENCE)
    assert len(server._cache) <= 4  # the newest may still have been at work when the others were counted


def test_a_fork_server_that_was_killed_is_started_again():
    server = GrammarServer(NANO, 4096, [1])
    assert isinstance(compiled(server, Grammar("regex", "a"))[0], bytes)
    first = server._process.pid
    os.kill(first, signal.SIGKILL)
    server._process.wait()
    assert isinstance(compiled(server, Grammar("regex", "b"))[0], bytes)
    second = server._process.pid
    server.close()
    assert first != second and not Path(f"/proc/{second}").exists()


def test_a_helper_that_cannot_start_refuses_and_says_why(tmp_path):
    server = GrammarServer(tmp_path, 4096, [1])
    result, _ = compiled(server, Grammar("regex", "a"))
    server.close()
    assert "structured outputs are not available: ModelError" in str(result) and "tokenizer.json is missing" in str(
        result
    )


def test_what_stands_in_the_way_of_a_helper_refuses_this_time_only(server, monkeypatch):
    def no_more(*arguments):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("deepinfer.structured.server.socket.socketpair", no_more)
        result, _ = compiled(server, Grammar("regex", "later"))
    assert "the grammar helper process cannot be reached ([Errno 24]" in str(result)
    assert isinstance(compiled(server, Grammar("regex", "later"))[0], bytes)


def test_search_paths_that_are_no_text_are_left_out_as_imports_do(monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("somewhere"), *sys.path])
    server = GrammarServer(NANO, 4096, [1])
    assert isinstance(compiled(server, Grammar("regex", "a"))[0], bytes)
    server.close()


def test_closing_ends_helpers_although_a_forked_process_holds_copies_of_their_sockets():
    server = GrammarServer(NANO, 4096, [1])
    compiled(server, Grammar("regex", "a"))
    masks = os.memfd_create("masks")
    os.truncate(masks, 4 * 129)
    first, second = server.connect(masks), server.connect(masks)
    copies = [os.dup(end.fileno()) for end in (server._control, first, second)]
    wait_until(lambda: len(children(server._process.pid)) >= 2)
    matchers = children(server._process.pid)
    hang_up(first)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(timeout=PATIENCE)
    assert not closing.is_alive()
    wait_until(lambda: not any(map(is_running, matchers)))
    for descriptor in (*copies, masks):
        os.close(descriptor)


def test_a_closed_server_starts_no_helper():
    server = GrammarServer(NANO, 4096, [1])
    server.close()
    with pytest.raises(RequestError, match="the engine was closed"):
        server._compile(Grammar("regex", "a"))
    assert server._process is None
