"""An engine in a process of its own: requests go down, steps come up, and its end is told."""

import os
import signal
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

import goldens
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.remote import EngineProcess
from deepinfer.engine.wire import MAX_STEPS, Alive, Failed, Finish, Ready, Refused, Start, Steps, Submit
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import SamplingParams
from waiting import PATIENCE, wait_until

OPTIONS = {"device": "null", "max_num_requests": 4, "num_blocks": 64, "max_queue": 1}


class Watched:
    """A process with everything that it reports."""

    def __init__(self, **options):
        self.reports, self.ends = SimpleQueue(), SimpleQueue()
        self.gate = None
        start = Start(EngineConfig.from_options(OPTIONS | options), goldens.CHECKPOINT, (1,), "error")
        self.process = EngineProcess(start, self._take, self.ends.put)

    def _take(self, report):
        if isinstance(report, Alive):
            return
        if self.gate is not None and isinstance(report, Steps):
            self.gate.wait()
        self.reports.put(report)

    def next(self):
        return self.reports.get(timeout=PATIENCE)

    def answer(self, name):
        """The tokens of a request and its end."""
        tokens = []
        while True:
            report = self.next()
            assert isinstance(report, Steps)
            for output in report.outputs:
                lines = zip(output.request_ids, output.token_ids.tolist(), strict=True)
                tokens += [token for owner, token in lines if owner == name]
                for ended in output.finished:
                    if ended.request_id == name:
                        return tokens, ended, report.stats


def request(name, count=5, **params):
    fields = {"max_tokens": count, "seed": 3, "ignore_eos": True} | params
    return Submit(GenerateRequest(name, np.arange(3, 9, dtype=np.int32), SamplingParams(**fields), time.monotonic()))


@pytest.fixture(scope="module")
def engine():
    watched = Watched()
    ready = watched.next()
    assert isinstance(ready, Ready) and ready.num_cache_tokens == 64 * ready.stats.block_tokens
    yield watched
    watched.process.close()


def test_tokens_and_the_end_of_a_request_arrive(engine):
    engine.process.send(request("a"))
    tokens, ended, stats = engine.answer("a")
    engine.process.send(request("a"))  # the id is free again
    assert len(tokens) == 5 and ended.reason == "length"
    assert engine.answer("a")[0] == tokens
    assert stats.num_running == 0 and stats.num_free_blocks == 64


def test_a_request_can_be_ended_and_an_unknown_one_is_ignored(engine):
    engine.gate = threading.Event()  # nobody reads, and so it stops before long
    engine.process.send(Finish("nobody", "abort"))
    engine.process.send(request("b", 8000))
    engine.process.send(Finish("b", "abort"))
    wait_until(engine.process._commands.empty)
    engine.gate.set()
    tokens, ended, stats = engine.answer("b")
    assert ended.reason == "abort" and len(tokens) < 8000
    assert stats.num_free_blocks == 64


def test_a_refused_request_is_told_apart(engine):
    engine.process.send(request("c", 100_000))
    refused = engine.next()
    assert isinstance(refused, Refused) and refused.request_id == "c" and not refused.is_queue_full
    assert "'c'" in refused.error


def test_signals_that_end_a_server_leave_the_engine_alive(engine):
    os.kill(engine.process.pid, signal.SIGTERM)
    os.kill(engine.process.pid, signal.SIGINT)
    engine.process.send(request("d"))
    assert engine.answer("d")[1].reason == "length"


def test_killed_process_reports_its_signal():
    watched = Watched()
    assert isinstance(watched.next(), Ready)
    watched.process.send(request("a", 50))
    watched.next()
    os.kill(watched.process.pid, signal.SIGKILL)
    assert watched.ends.get(timeout=PATIENCE) == -signal.SIGKILL
    watched.process.send(request("b"))  # goes nowhere
    watched.process.close()


def test_engine_that_cannot_start_says_why():
    watched = Watched(max_model_len=10**6)
    failed = watched.next()
    assert isinstance(failed, Failed) and failed.is_refusal and "max_model_len" in failed.error
    assert watched.ends.get(timeout=PATIENCE) == 2


def test_engine_waits_for_a_server_that_does_not_read():
    watched = Watched(max_num_requests=1)
    watched.next()
    watched.gate = threading.Event()  # holds the reader at its first report
    watched.process.send(request("a", 400))
    time.sleep(1.0)
    watched.gate.set()
    sizes = []
    while True:
        report = watched.next()
        sizes.append(len(report.outputs))
        if any(output.finished for output in report.outputs):
            break
    assert max(sizes) <= MAX_STEPS + 1
    watched.process.close()
    assert watched.ends.get(timeout=PATIENCE) == 0
