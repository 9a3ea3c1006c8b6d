"""The clock around ops: same results, time in the right group."""

import sys
import threading
import time

import torch

import goldens
from deepinfer import LLM, SamplingParams
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.ops.clock import GROUP_OF, OpClock
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import OP_NAMES, WHOLES, build


def test_every_op_that_runs_in_a_step_belongs_to_one_group():
    assert sorted(GROUP_OF) == sorted(
        name for name in OP_NAMES if not name.startswith("prepare") and name not in WHOLES
    )


def test_time_goes_to_the_group_of_the_op_and_is_handed_out_once():
    reference = reference_ops("fast")

    def slow(logits):
        time.sleep(0.02)
        return reference["best_tokens"](logits)

    clock = OpClock(torch.device("cpu"))
    ops = clock.around(build({"reference": reference, "slow": {"best_tokens": slow}}))
    assert ops.clock is clock
    started = time.perf_counter()
    for _ in range(2):
        assert ops.best_tokens(torch.tensor([[1.0, 3.0, 2.0]]))[0].tolist() == [1]
    taken = clock.take()
    assert list(taken) == ["sampling"] and 0.04 <= taken["sampling"] <= time.perf_counter() - started
    assert clock.take() == {}


def test_no_time_is_lost_that_another_thread_collects(monkeypatch):
    """Each call takes a second of its own thread's clock."""
    own = threading.local()

    def second() -> float:
        own.now = getattr(own, "now", 0) + 1
        return own.now

    monkeypatch.setattr("deepinfer.ops.clock.time.perf_counter", second)
    clock, taken, interval = OpClock(torch.device("cpu")), [], sys.getswitchinterval()

    def best_logprobs(logits):
        return logits

    def best_tokens(logits):
        return logits

    quick = {"best_logprobs": best_logprobs, "best_tokens": best_tokens}
    ops = clock.around(build({"reference": reference_ops("fast"), "quick": quick}))
    calls = (lambda: ops.best_logprobs(1)), (lambda: ops.best_tokens(1))
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda op=op: [op() for _ in range(10_000)]) for op in calls]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken.append(clock.take_ops())
    finally:
        sys.setswitchinterval(interval)
    taken.append(clock.take_ops())
    names = "best_logprobs", "best_tokens"
    assert [sum(one.get(name, 0) for one in taken) for name in names] == [10_000] * 2


def test_an_engine_with_timed_ops_answers_the_same_and_tells_their_time():
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = []
    for time_ops in (False, True):
        with LLM(goldens.CHECKPOINT, device="cpu", time_ops=time_ops) as llm:
            answers.append(llm.generate([[5, 6, 7]], params)[0].token_ids)
            stats = llm.stats()
        assert bool(stats.op_seconds) is time_ops
    assert answers[0] == answers[1]
    assert {"attention", "experts", "hyper-connections", "head", "sampling"} <= set(stats.op_seconds)
    assert 0 < sum(stats.op_seconds.values()) < stats.device_seconds


def test_native_ops_run_one_by_one_behind_the_clock():
    native = build({"reference": reference_ops("fast"), "cpu": cpu_ops()})
    timed = OpClock(torch.device("cpu")).around(native)
    assert native.origin["run_layers"] == "cpu" and timed.origin["run_layers"] == "composed"
    assert timed.origin["experts"] == "cpu"  # steps are as long as without a clock
