"""Numbers arrive as they were sent, whatever either side does meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.ops.transfer import Arrival, Moment, Staged, to_device

DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]
BUSY_CYCLES = 50_000_000  # some 30 ms


def keep_busy(device: torch.device) -> None:
    """Work of a device before that of the test."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_])
def test_what_is_sent_comes_back(device: torch.device, size: int, dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2**31 - 1, size).astype(dtype)
    keep_busy(device)
    sent = to_device(values, device)
    assert sent.device.type == device.type
    (back, doubled) = Arrival(sent, sent.double() * 2).wait()
    assert back.dtype == dtype and np.array_equal(back, values) and np.array_equal(doubled, values.astype(float) * 2)


def test_a_device_that_is_busy_gets_what_was_sent_then() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, values = torch.device("cuda"), np.arange(1000)
    keep_busy(device)
    sent = to_device(values, device)
    values[:] = -1
    assert torch.equal(sent.cpu(), torch.arange(1000))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_staged_numbers_are_there_when_what_follows_reads_them(device: torch.device) -> None:
    staged, found = Staged(8, device), []
    for number in range(3):
        keep_busy(device)
        staged.host[:5] = number
        staged.send(5)
        found.append(staged.numbers.clone())
        Arrival(found[-1]).wait()
    assert [one.tolist() for one in found] == [[number] * 5 + [0] * 3 for number in range(3)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_time_between_two_moments_is_that_of_the_work_between_them(device: torch.device) -> None:
    first = Moment(device)
    keep_busy(device)
    second = Moment(device)
    second.wait()
    assert first.seconds_since(first) == 0.0
    assert second.seconds_since(first) > (0.005 if device.type == "cuda" else 0.0)
