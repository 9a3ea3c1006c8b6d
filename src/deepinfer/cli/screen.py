"""How an answer looks as it streams: thinking dimmed on a terminal, marked by words elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes the pieces of one answer after the other; notes go to standard error."""

    def __init__(self, out: TextIO):
        self.out = out
        self.is_terminal = out.isatty()
        self._part: str | None = None

    def thinking(self, text: str) -> None:
        """More of what the model thinks."""
        if text:
            self._enter("thinking")
            self._write(f"{DIM}{text}{NORMAL}" if self.is_terminal else text)

    def content(self, text: str) -> None:
        """More of the answer itself."""
        if text:
            self._enter("content")
            self._write(text)

    def end_answer(self) -> None:
        """Close the answer's last line."""
        if self._part is not None:
            self._write("\n")
        self._part = None

    def note(self, text: str) -> None:
        """A word from the program, apart from the answer."""
        self.out.flush()
        print(f"{DIM}{text}{NORMAL}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def _enter(self, part: str) -> None:
        if self._part == part:
            return
        if part == "thinking" and not self.is_terminal:
            self._write("[thinking] ")
        if self._part == "thinking":
            self._write("\n\n" if self.is_terminal else "\n[answer] ")
        self._part = part

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
