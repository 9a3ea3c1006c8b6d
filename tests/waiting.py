"""How tests wait for what must happen, and hold an engine's device meanwhile, so that no clock decides."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from deepinfer import LLM

PATIENCE = 120.0  # seconds, on a busy machine


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Fails when the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def is_running(process_id: int) -> bool:
    """Whether a process is there and more than the exit code that nobody asks for."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def held(llm: LLM, *, after: int = 0) -> Iterator[threading.Event]:
    """In here the device does `after` steps and then waits for the event, which is set at the end too."""
    executor, go_on, numbers = llm._client.core.executor, threading.Event(), itertools.count()
    execute = executor.execute

    def wait_first(plan: Any) -> Any:
        if next(numbers) >= after:
            assert go_on.wait(PATIENCE)
        return execute(plan)

    with patch.object(executor, "execute", wait_first):
        try:
            yield go_on
        finally:
            go_on.set()
