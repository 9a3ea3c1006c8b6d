"""The engine process dies or hangs: clients are told, and the service comes back by itself."""

import os
import signal
import threading
import time

import pytest

from serve_client import running, wait_until

LONG = {"prompt": [5], "max_tokens": 8000, "ignore_eos": True}
SHORT = {"prompt": [5], "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def own():
    with running({"device": "null", "num_blocks": 1024}) as one:
        yield one


def ask_until_it_breaks(server, ends, is_stream):
    if is_stream:  # its headers are out when the engine dies
        ends.append(server.events("/v1/completions", **LONG)[-1]["error"]["code"])
    else:
        ends.append(server.post("/v1/completions", **LONG).json()["error"]["code"])


def test_a_killed_engine_is_reported_and_comes_back(own):
    before = own.post("/v1/completions", **SHORT).json()["choices"][0]["text"]
    ends: list[str] = []
    threads = [threading.Thread(target=ask_until_it_breaks, args=(own, ends, number % 2 == 0)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: own.service.link.num_requests == 6)
    time.sleep(0.5)
    killed = own.service.supervisor.pid
    started = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert ends == ["engine_stopped"] * 6 and time.monotonic() - started < 5.0
    response = own.http.get("/health")
    assert response.status_code == 503 and response.json()["engine"] == "starting"
    assert own.http.get("/ready").status_code == 503
    refused = own.post("/v1/completions", **LONG)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    wait_until(lambda: own.http.get("/health").status_code == 200, 30)
    assert own.service.supervisor.pid != killed
    assert own.post("/v1/completions", **SHORT).json()["choices"][0]["text"] == before
    assert "deepinfer:engine_restarts{" in own.http.get("/metrics").text and own.is_idle()


def test_an_engine_that_keeps_dying_is_started_ever_more_slowly(own):
    delays = []
    for _ in range(2):
        delays.append(own.service.supervisor._delay)
        os.kill(own.service.supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not own.service.link.is_up, 5)
        wait_until(lambda: own.service.link.is_up, 30)
    assert delays[1] == 2 * delays[0]


@pytest.fixture(scope="module")
def watched():
    with running({"device": "null", "num_blocks": 1024}, stuck_seconds=5) as one:
        yield one


@pytest.mark.parametrize("num_streams", [0, 4])
def test_an_engine_that_hangs_is_killed_and_comes_back(watched, num_streams):
    ends: list[str] = []
    threads = [threading.Thread(target=ask_until_it_breaks, args=(watched, ends, True)) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    wait_until(lambda: watched.service.link.num_requests == num_streams)
    stuck, restarts = watched.service.supervisor.pid, watched.service.supervisor.num_restarts
    os.kill(stuck, signal.SIGSTOP)
    wait_until(lambda: watched.http.get("/health").status_code == 503, 10)
    for thread in threads:
        thread.join(5)
    assert ends == ["engine_stopped"] * num_streams
    wait_until(lambda: watched.http.get("/health").status_code == 200)
    assert watched.service.supervisor.pid != stuck and watched.service.supervisor.num_restarts == restarts + 1
    assert watched.post("/v1/completions", **SHORT).status_code == 200


def test_an_engine_that_has_nothing_to_do_is_left_alone(watched):
    pid = watched.service.supervisor.pid
    time.sleep(7)
    assert watched.service.supervisor.pid == pid and watched.http.get("/health").status_code == 200
