"""A recorder without a device: a graph is the call itself, and what it did is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class FakeRecorder:
    """bytes_each: what each graph takes of the shared memory, in the order of their recording; the last one repeats.

    room: bytes that the device has; a graph that does not fit is not recorded. errors: raised by the first
    recordings, one each, after they have called.
    """

    def __init__(self, *bytes_each: int, room: int | None = None, errors: Iterable[Exception] = ()) -> None:
        self._bytes_each, self._room, self._errors = bytes_each or (0,), room, iter(errors)
        self.num_bytes = self.num_recorded = self.num_resets = self.num_replays = 0

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        self.num_bytes += self._bytes_each[min(self.num_recorded, len(self._bytes_each) - 1)]
        self.num_recorded += 1
        if self._room is not None and self.num_bytes > self._room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.")
        call()
        if (error := next(self._errors, None)) is not None:
            raise error

        def replay() -> None:
            self.num_replays += 1
            call()

        return replay

    def reset(self) -> None:
        self.num_bytes = 0
        self.num_resets += 1
