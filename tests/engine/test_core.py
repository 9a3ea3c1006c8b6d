"""EngineCore over a null runner that the test can hold and spoil."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from deepinfer.engine.core import EngineCore
from deepinfer.engine.device_thread import DeviceThread
from deepinfer.errors import EngineDeadError
from deepinfer.messages import StepOutput
from fake_core import NUM_BLOCKS, expected, make_core, request
from waiting import PATIENCE, wait_until


def drain(core: EngineCore) -> list[StepOutput]:
    outputs = []
    while core.has_work():
        output = core.step()
        outputs += [] if output is None else [output]
        assert len(outputs) < 100
    return outputs


@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_and_ends_come_out_once_and_in_order(is_async: bool) -> None:
    core, executor = make_core(is_async=is_async)
    core.add(request("a"))
    outputs = drain(core)
    assert [token for output in outputs for token in output.token_ids.tolist()] == expected()
    ends = [ended for output in outputs for ended in output.finished]
    assert [(ended.request_id, ended.reason) for ended in ends] == [("a", "length")]
    stats = core.stats()
    assert (stats.num_steps, stats.num_tokens, stats.num_generated_tokens) == (5, 6, 5) == (len(executor.plans), 6, 5)
    assert stats.num_free_blocks == stats.num_blocks == NUM_BLOCKS
    core.close()


def test_two_steps_are_under_way_when_planning_ahead_and_one_otherwise() -> None:
    for is_async, outputs_of_two_steps in ((True, 1), (False, 2)):
        core, _ = make_core(is_async=is_async)
        core.add(request("a"))
        assert sum(core.step() is not None for _ in range(2)) == outputs_of_two_steps
        drain(core)
        core.close()


def test_requests_are_added_and_ended_while_the_device_is_busy() -> None:
    core, executor = make_core()
    core.add(request("a"))
    executor.gate.clear()
    core.step()
    stepping = threading.Thread(target=core.step)
    stepping.start()
    wait_until(lambda: core.stats().num_steps == 2)  # both are planned
    core.add(request("b"))  # neither waits for the device
    assert core.finish("a", "stop") and not core.finish("a", "stop") and not core.finish("unknown", "abort")
    assert core.stats().num_waiting == 1
    executor.gate.set()
    stepping.join()
    outputs = drain(core)
    assert [token for output in outputs for token in output.token_ids.tolist()] == expected()
    core.close()


def test_an_end_from_outside_is_handed_out_though_nothing_is_left_to_compute() -> None:
    core, executor = make_core()
    core.add(request("a"))
    assert core.finish("a", "abort") and core.has_work()
    output = core.step()
    assert [(ended.request_id, ended.reason) for ended in output.finished] == [("a", "abort")]
    assert not core.has_work() and not executor.plans
    core.add(request("a", 1))  # the id is free again
    assert [output.token_ids.tolist() for output in drain(core)] == [expected(1)]
    core.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_step_is_raised_by_step_and_the_one_behind_it_can_be_dropped(is_async: bool) -> None:
    core, executor = make_core(is_async=is_async)
    executor.fails_at = 2
    core.add(request("a"))
    with pytest.raises(RuntimeError, match="the device burns"):
        drain(core)
    core.close()
    assert len(executor.plans) <= 3


def test_close_waits_for_the_running_step_and_drops_the_next() -> None:
    core, executor = make_core()
    executor.gate.clear()
    core.add(request("a"))
    assert core.step() is None
    plan = core.scheduler.schedule()
    core._device.submit(plan)
    wait_until(lambda: core._device._plans.qsize() == 1)  # what has not begun is dropped
    closing = threading.Thread(target=core.close)
    closing.start()
    wait_until(lambda: core._device._is_closing)
    closing.join(0.05)
    assert closing.is_alive()
    executor.gate.set()
    closing.join()
    assert [plan.step for plan in executor.plans] == [1]
    assert core._device.result().step == 1
    waiting = threading.Thread(target=core._device.result, daemon=True)  # in vain, were it not told
    with mock.patch.object(threading, "excepthook") as told:
        waiting.start()
        waiting.join(PATIENCE)
    assert told.call_args.args[0].exc_type is EngineDeadError


def test_the_device_thread_carries_out_plans_in_order_and_passes_errors_on() -> None:
    core, executor = make_core()
    core.add(request("a"))
    plans = [core.scheduler.schedule() for _ in range(3)]
    executor.fails_at = 3
    thread = DeviceThread(executor)
    for plan in plans:
        thread.submit(plan)
    assert thread.num_in_flight == 3
    assert [thread.result().step for _ in range(2)] == [1, 2]
    with pytest.raises(RuntimeError, match="the device burns"):
        thread.result()
    assert not thread.has_result() and thread.num_in_flight == 0
    thread.close()
    core.close()
