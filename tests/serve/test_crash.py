"""The engine process dies or hangs: clients are told, and the service comes back by itself."""

import contextlib
import os
import signal
import threading
import time
from unittest.mock import patch

import pytest

import goldens
from serve_client import running
from waiting import PATIENCE, wait_until

ENGINE = {"device": "null", "model": str(goldens.CHECKPOINT), "num_blocks": 2048}
LONG = {"prompt": [5], "max_tokens": 32_000, "ignore_eos": True}
SHORT = {"prompt": [5], "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def own():
    with running(ENGINE) as one:
        yield one


def ask_until_it_breaks(server, ends, is_stream):
    if is_stream:  # its headers are out when the engine dies
        ends.append(server.events("/v1/completions", **LONG)[-1]["error"]["code"])
    else:
        ends.append(server.post("/v1/completions", **LONG).json()["error"]["code"])


def ask_long(server, kinds):
    """Requests, streams or not, that all have their first token; their threads, and how they will have ended."""
    ends: list[str] = []
    threads = [threading.Thread(target=ask_until_it_breaks, args=(server, ends, is_stream)) for is_stream in kinds]
    for thread in threads:
        thread.start()
    entries = server.service.link._entries
    wait_until(lambda: sum(entry.last_token is not None for entry in [*entries.values()]) == len(kinds))
    return threads, ends


@contextlib.contextmanager
def kept_down(server):
    """An engine that ends in here is started again at the end, not before."""
    supervisor, is_due = server.service.supervisor, threading.Event()
    launch = supervisor._launch
    with patch.object(supervisor, "_launch", is_due.set):
        yield
        assert is_due.wait(PATIENCE)
    server.loop.call_soon_threadsafe(launch)


def test_a_killed_engine_is_reported_and_comes_back(own):
    before = own.post("/v1/completions", **SHORT).json()["choices"][0]["text"]
    threads, ends = ask_long(own, [True, False] * 3)
    killed = own.service.supervisor.pid
    with kept_down(own):
        started = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        for thread in threads:
            thread.join(PATIENCE)
        assert ends == ["engine_stopped"] * 6 and time.monotonic() - started < own.service.options.stuck_seconds / 10
        response = own.http.get("/health")
        assert response.status_code == 503 and response.json()["engine"] == "starting"
        assert own.http.get("/ready").status_code == 503
        refused = own.post("/v1/completions", **LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
    wait_until(lambda: own.http.get("/health").status_code == 200)
    assert own.service.supervisor.pid != killed
    assert own.post("/v1/completions", **SHORT).json()["choices"][0]["text"] == before
    assert "deepinfer:engine_restarts{" in own.http.get("/metrics").text and own.is_idle()


def test_an_engine_that_keeps_dying_is_started_ever_more_slowly(own):
    supervisor, delays = own.service.supervisor, []
    for _ in range(2):
        delays.append(supervisor._delay)
        restarts = supervisor.num_restarts
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda restarts=restarts: supervisor.num_restarts == restarts + 1)
        wait_until(lambda: own.service.link.is_up)
    assert delays[1] == 2 * delays[0]


@pytest.fixture(scope="module")
def watched():
    with running(ENGINE, stuck_seconds=5) as one:
        yield one


@pytest.mark.parametrize("num_streams", [0, 4])
def test_an_engine_that_hangs_is_killed_and_comes_back(watched, num_streams):
    threads, ends = ask_long(watched, [True] * num_streams)
    stuck, restarts = watched.service.supervisor.pid, watched.service.supervisor.num_restarts
    with kept_down(watched):
        os.kill(stuck, signal.SIGSTOP)
        wait_until(lambda: watched.http.get("/health").status_code == 503)
        for thread in threads:
            thread.join(PATIENCE)
        assert ends == ["engine_stopped"] * num_streams
    wait_until(lambda: watched.http.get("/health").status_code == 200)
    assert watched.service.supervisor.pid != stuck and watched.service.supervisor.num_restarts == restarts + 1
    assert watched.post("/v1/completions", **SHORT).status_code == 200


def test_an_engine_that_has_nothing_to_do_tells_that_it_is_alive(watched):
    """So it is left alone, see `test_supervisor`."""
    for _ in range(3):
        watched.service.supervisor._has_told = False
        wait_until(lambda: watched.service.supervisor._has_told)
    assert watched.http.get("/health").status_code == 200
