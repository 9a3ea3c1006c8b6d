"""`deepinfer generate`: answers to prompts from arguments, a file or standard input, in their order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from deepinfer.cli import jobs
from deepinfer.cli.common import (
    add_engine_flags,
    add_sampling_flags,
    open_llm,
    read_text,
    sampling_flags,
)
from deepinfer.cli.jobs import Job
from deepinfer.errors import ConfigError
from deepinfer.frontend.outputs import ChatOutput, RequestOutput
from deepinfer.sampling.params import SamplingParams, merge_params


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("generate", help="answer prompts in bulk", description=__doc__)
    parser.add_argument("prompts", nargs="*", help="each argument is one prompt")
    parser.add_argument(
        "--file", help="read prompts from a file: one a line, or JSON lines when its name ends in .jsonl"
    )
    parser.add_argument("--json", action="store_true", help="read JSON lines (file or standard input), and print them")
    parser.add_argument(
        "--chat", action="store_true", help="a plain prompt is a user's message, not text to go on from"
    )
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False, help="think first (chats)")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt; returns 1 when one or more of them failed."""
    given = sampling_flags(args)
    lines, is_json = read_lines(args)
    with open_llm(args) as llm:
        params = merge_params(llm.default_params, given)
        work = make_jobs(lines, params, is_json=is_json, is_chat=args.chat, thinking=args.thinking)
        jobs.answer(llm, work)
    for job in work:
        if args.json:
            print(as_line(job))
        else:
            print_plain(job, is_only=len(work) == 1)
    return 1 if any(job.error is not None for job in work) else 0


def read_lines(args: argparse.Namespace) -> tuple[list[str], bool]:
    """(prompts or JSON lines, whether they are JSON)."""
    if args.prompts:
        if args.file:
            raise ConfigError("prompts are given as arguments and with --file; give them in one way")
        return args.prompts, False
    if args.file:
        return read_text(args.file).split("\n"), args.json or args.file.endswith(".jsonl")
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt; give one as an argument, with --file or on standard input")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read standard input: {error}") from None
    return text.split("\n"), args.json  # `splitlines` would also cut inside of JSON texts, at U+2028 say


def make_jobs(
    lines: Iterable[str], params: SamplingParams, *, is_json: bool, is_chat: bool, thinking: bool
) -> list[Job]:
    """The work, in the order of the lines. Raises ConfigError when there is none."""
    chat = {"thinking": thinking}
    if is_json:
        work = jobs.json_jobs(lines, params, chat=chat)
    else:
        work = jobs.text_jobs([line for line in lines if line.strip()], params, is_chat=is_chat, chat=chat)
    if not work:
        raise ConfigError("the input holds no prompt; give one prompt a line")
    return work


def as_line(job: Job) -> str:
    """`as_record` as JSON. A lone surrogate, which an id may hold, has no UTF-8 form and stays the escape it was."""
    return json.dumps(as_record(job), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def as_record(job: Job) -> dict[str, Any]:
    """One output line: the place of the prompt in the input, its id if it had one, then answer or error."""
    record: dict[str, Any] = {"index": job.index}
    if job.id is not None:
        record["id"] = job.id
    if job.output is not None:
        record.update(job.output.as_dict())
        for answer in (record, *record["more"]):
            del answer["prompt_token_ids"]
    record["error"] = job.error
    return record


def print_plain(job: Job, *, is_only: bool) -> None:
    """The answer (or answers) as text, under its number when there are several prompts; errors go to standard error."""
    if job.error is not None:
        print(f"deepinfer: prompt {job.index + 1}: {job.error}", file=sys.stderr)
        return
    assert job.output is not None, "a job without an error has an output"
    if not is_only:
        print(f"[{job.index + 1}]", end=" ")
    print("\n".join(map(answer_text, job.output.outputs)))


def answer_text(output: RequestOutput) -> str:
    """What a person reads: the text, or the parts of a chat answer that has more than one."""
    if not isinstance(output, ChatOutput):
        return output.text
    parts = [f"[thinking] {output.reasoning}\n[answer] {output.content}" if output.reasoning else output.content]
    parts += [f"[tool call] {call.name} {call.arguments}" for call in output.tool_calls]
    return "\n".join(part for part in parts if part)
