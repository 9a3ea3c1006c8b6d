"""`deepinfer chat`: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.common import add_engine_flags, add_sampling_flags, open_llm, sampling_flags
from deepinfer.cli.screen import Screen
from deepinfer.errors import ConfigError, RequestError
from deepinfer.images.decode import ImageLimits
from deepinfer.images.sources import image_bytes
from deepinfer.sampling.params import SamplingParams, merge_params

if TYPE_CHECKING:
    from deepinfer.llm import LLM

HELP = """/help            this list
/reset           forget the conversation
/image PATH      show the model an image with the next message (png, jpeg, webp, gif)
/think on|off    let the model think before it answers
/system TEXT     set the system prompt and forget the conversation
/exit            leave (also Ctrl-D); Ctrl-C stops an answer"""
COMMANDS = ("/help", "/reset", "/image", "/think", "/system", "/exit")


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("chat", help="talk to a model")
    parser.add_argument("prompt", nargs="*", help="answer this and leave; without it, a conversation")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--image", metavar="PATH", action="append", default=[], help="show this image; repeatable")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False, help="think first")
    parser.add_argument("--effort", help="how much to think: low, high, xhigh or max")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt of the command line, or every line of the input until it ends."""
    given = sampling_flags(args)
    if given.get("n", 1) != 1:
        raise ConfigError(f"n is {given['n']}, but a conversation goes on from one answer; leave --n out")
    with open_llm(args) as llm:
        chat = Chat(llm, merge_params(llm.default_params, given), Screen(sys.stdout), args.thinking, args.effort)
        chat.set_system(args.system)
        for path in args.image:
            chat.attach(path)
        if args.prompt:
            chat.answer(" ".join(args.prompt))
            return 0
        return converse(chat, is_terminal=sys.stdin.isatty())


def converse(chat: Chat, *, is_terminal: bool) -> int:
    """Take turns until the input ends or /exit; returns 1 when a turn was refused in a pipe."""
    if is_terminal:
        chat.screen.note("/help lists the commands, /exit leaves")
    num_refused = 0
    for line in read_lines(is_terminal):
        text = line.strip()
        if not text:
            continue
        if text.startswith("/"):
            if not chat.command(text):
                break
            continue
        try:
            chat.answer(text)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            chat.screen.end_answer()
            chat.screen.note("stopped; this turn is forgotten")
        except RequestError as error:
            num_refused += 1
            chat.screen.end_answer()
            chat.screen.note(str(error))
    return 1 if num_refused and not is_terminal else 0


def read_lines(is_terminal: bool) -> Iterator[str]:
    """The lines of the user: with a prompt and line editing on a terminal, as they come from a pipe."""
    if not is_terminal:
        yield from sys.stdin
        return
    import readline  # noqa: F401  (gives input() history and editing)

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


@dataclass
class Chat:
    """One conversation: what was said, and how the next answer is made."""

    llm: LLM
    params: SamplingParams
    screen: Screen
    thinking: bool = False
    effort: str | None = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)  # for the next message

    def set_system(self, text: str | None) -> None:
        """Start again under this system prompt."""
        self.system = text
        self.messages = [{"role": "system", "content": text}] if text else []

    def attach(self, path: str) -> None:
        """Put an image file behind the next message. Raises RequestError when it cannot be read."""
        limits = ImageLimits.of(self.llm.config.images)
        self.images.append({"type": "image", "image": image_bytes(Path(path).expanduser(), "image", limits)})

    def answer(self, text: str) -> None:
        """Stream the answer to one user turn; the turn is kept only when the answer is complete."""
        content: str | list[dict[str, Any]] = text
        if self.images:
            content, self.images = [{"type": "text", "text": text}, *self.images], []
        messages = [*self.messages, {"role": "user", "content": content}]
        started = time.monotonic()
        first = last = started
        num_tokens, pieces = 0, []
        deltas = self.llm.stream_chat(messages, self.params, thinking=self.thinking, effort=self.effort)
        for delta in deltas:
            last = time.monotonic()
            if delta.token_ids and not num_tokens:
                first = last
            num_tokens += len(delta.token_ids)
            self.screen.thinking(delta.answer.reasoning)
            self.screen.content(delta.answer.content)
            pieces.append(delta.answer.content)
            if delta.error is not None:
                raise RequestError(delta.error)
        self.screen.end_answer()
        self.screen.note(describe_speed(num_tokens, first - started, last - first))
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def command(self, text: str) -> bool:
        """Carry out a line that starts with a slash; False means leave."""
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            self.screen.note(HELP)
        elif name == "/reset":
            self.set_system(self.system)
            self.screen.note("the conversation is forgotten")
        elif name == "/image":
            self._attach_and_tell(rest.strip())
        elif name == "/think" and rest.strip() in ("on", "off"):
            self.thinking = rest.strip() == "on"
            self.screen.note(f"thinking is {rest.strip()}")
        elif name == "/think":
            self.screen.note("/think takes on or off")
        elif name == "/system":
            self.set_system(rest.strip() or None)
            self.screen.note("system prompt set; the conversation is forgotten" if self.system else "no system prompt")
        else:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            self.screen.note(f"unknown command {name}; {f'did you mean {near[0]}?' if near else 'see /help'}")
        return True

    def _attach_and_tell(self, path: str) -> None:
        try:
            self.attach(path)
            self.screen.note(f"the next message shows {path}")
        except RequestError as error:
            self.screen.note(str(error))


def describe_speed(num_tokens: int, first_seconds: float, decode_seconds: float) -> str:
    """One line: tokens, seconds to the first one, and tokens per second after it."""
    text = f"{num_tokens} token{'' if num_tokens == 1 else 's'}, first after {first_seconds:.2f} s"
    if num_tokens > 1 and decode_seconds > 0:
        text += f", then {(num_tokens - 1) / decode_seconds:.1f} tokens/s"
    return text
