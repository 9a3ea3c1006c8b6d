"""Seconds and memory that hostile grammars take before they are refused (or compiled, if they can be).

    PYTHONPATH=src:tests python benchmarks/structured/hostile.py

Each one is compiled in a process of its own; the limit is 1.5 s of processor time and 512 MiB beyond the
vocabulary. Target: an answer within 2 s.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import deepinfer
from deepinfer.errors import RequestError
from deepinfer.structured.grammar import Grammar
from deepinfer.structured.server import GrammarServer
from hostile_grammars import HEAVY, HOSTILE

NANO = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"


class Watch:
    """The largest resident memory of the fork server's children, in MiB."""

    def __init__(self, process_id: int) -> None:
        self._children = Path(f"/proc/{process_id}/task/{process_id}/children")
        self.peak = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._children.exists():
            for child in self._children.read_text().split():
                try:
                    pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                except (OSError, IndexError):
                    continue
                self.peak = max(self.peak, pages * 4096 // 2**20)
            time.sleep(0.002)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    server = GrammarServer(NANO, 4096, [1])
    server.compile(Grammar("regex", "warm")).result()
    assert server._process is not None
    watch, slowest = Watch(server._process.pid), 0.0
    for grammar in HOSTILE + HEAVY:
        watch.peak, started = 0, time.monotonic()
        try:
            result = f"compiled, {len(server.compile(grammar).result().data)} bytes"
        except RequestError as error:
            result = str(error)
        seconds = time.monotonic() - started
        slowest = max(slowest, seconds)
        print(f"{seconds:5.2f} s {watch.peak:4d} MiB  {grammar.kind:11} {grammar.text[:32]!r:36} {result[:90]}")
    print(f"slowest: {slowest:.2f} s")
    server.close()


if __name__ == "__main__":
    main()
