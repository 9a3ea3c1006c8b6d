"""`deepinfer serve` as a process of its own, for the scripts beside this file."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx


@dataclass
class Server:
    """Its address and processes."""

    url: str
    pid: int
    engine_pid: int

    def metric(self, name: str) -> float:
        """The first sample of that name."""
        page = httpx.get(self.url + "/metrics", timeout=60).text
        return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    def memory_mib(self) -> tuple[int, int]:
        """Resident memory of web process and engine."""
        return tuple(_resident(pid) for pid in (self.pid, self.engine_pid))  # type: ignore[return-value]

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time of web process and engine so far."""
        return tuple(_cpu(pid) for pid in (self.pid, self.engine_pid))  # type: ignore[return-value]

    def is_idle(self) -> bool:
        return self.metric("deepinfer:num_requests_running") == 0 == self.metric("deepinfer:kv_cache_usage_perc")

    def seconds_until_idle(self, limit: float = 60.0) -> float:
        started = time.monotonic()
        while not self.is_idle():
            assert time.monotonic() - started < limit, "the engine is still at work"
            time.sleep(0.02)
        return time.monotonic() - started


@contextlib.contextmanager
def running(*flags: str) -> Iterator[Server]:
    """Start a server and stop it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "serve", "--port", "0", "--log-level", "info", *flags],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        url, engine = "", 0
        for line in process.stderr:
            if found := re.search(r"ready \(process (\d+)\)", line):
                engine = int(found[1])
            if found := re.search(r"listening on (http://[\w.:]+)", line):
                url = found[1]
                break
        assert url, "the server did not start"
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield Server(url, process.pid, engine)
        drain.terminate()
    finally:
        process.terminate()
        process.wait(60)


def _resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in fields if line.startswith("VmRSS"))


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
