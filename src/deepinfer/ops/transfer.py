"""Numbers on their way between host and device, while both go on with other work."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Numbers of the host on a device, which is not waited for; no copy where both are one.

    From memory that is not pinned a copy would begin only when all work before it is done.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if values.size else tensor).to(device, non_blocking=True)


class Moment:
    """A point in a device's work: behind all that is queued by now. On a CPU that is done, so it is the present."""

    def __init__(self, device: torch.device) -> None:
        self._time, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Return when the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """From another moment of the same device to this one; both have passed."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Arrival:
    """Tensors of a device on their way to pinned memory of the host, behind the work that makes them.

    there: when they have arrived.
    """

    def __init__(self, *values: Tensor) -> None:
        self._values = tuple(value if value.is_cpu else value.to("cpu", non_blocking=True) for value in values)
        self.there = Moment(values[0].device)

    def wait(self) -> list[NDArray[Any]]:
        """The values on the host, once they are there."""
        self.there.wait()
        return [value.numpy() for value in self._values]


class Staged:
    """int32 numbers that go to the device in one copy, into the same memory each time: `numbers` [size]."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._is_host = device.type == "cpu"
        self._pinned = self.numbers if self._is_host else torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._host: NDArray[np.int32] = self._pinned.numpy()
        self._sent: torch.cuda.Event | None = None

    def send(self, values: NDArray[np.int32]) -> None:
        """Put them first. The device's work is not waited for, but for the copy of the last ones."""
        count = len(values)
        if self._sent is not None:
            self._sent.synchronize()
        self._host[:count] = values
        if self._is_host:
            return
        self.numbers[:count].copy_(self._pinned[:count], non_blocking=True)
        self._sent = self._sent or torch.cuda.Event()
        self._sent.record()
