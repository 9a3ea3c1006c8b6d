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
    """int32 numbers that go to the device in one copy, from and into the same memory each time, so it can be captured.

    host [size] becomes numbers [size] when the device comes to the copy. So it is changed only when something has
    arrived that was queued behind the last copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = self.numbers
        if device.type != "cpu":
            self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.host: NDArray[np.int32] = self._pinned.numpy()

    def send(self, count: int) -> None:
        """Queue the copy of the first numbers."""
        if self._pinned is not self.numbers:
            self.numbers[:count].copy_(self._pinned[:count], non_blocking=True)
