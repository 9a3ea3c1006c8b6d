"""The prompts of `deepinfer generate`: read from lines, checked one by one, answered in as few batches as possible."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.errors import RequestError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.sampling.params import SamplingParams, merge_params

if TYPE_CHECKING:
    from deepinfer.llm import LLM

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
CHAT_FIELDS = ("thinking", "effort", "tools", "response_format")


@dataclass
class Job:
    """One prompt, and its answer once there is one.

    prompt: {"prompt": text} or {"prompt_token_ids": ids}, either with "images" or without; None for a conversation,
        which `messages` holds.
    chat: the chat settings of a conversation (see CHAT_FIELDS).
    error: why the line could not be used; such a job is never sent.
    """

    index: int
    id: Any = None
    prompt: dict[str, Any] | None = None
    messages: list[Any] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    chat: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    output: RequestOutput | None = None


def text_jobs(prompts: Iterable[str], params: SamplingParams, *, is_chat: bool, chat: Mapping[str, Any]) -> list[Job]:
    """One job for each plain prompt: text to go on from, or a user's message when `is_chat`."""
    if is_chat:
        return [
            Job(index, messages=[{"role": "user", "content": text}], params=params, chat=dict(chat))
            for index, text in enumerate(prompts)
        ]
    return [Job(index, prompt={"prompt": text}, params=params) for index, text in enumerate(prompts)]


def json_jobs(lines: Iterable[str], params: SamplingParams, *, chat: Mapping[str, Any]) -> list[Job]:
    """One job for each JSON line that is not blank; a line that cannot be used becomes a job with an error."""
    jobs: list[Job] = []
    for line in lines:
        if not line.strip():
            continue
        job = Job(len(jobs))
        try:
            _read(job, line, params, chat)
        except RequestError as error:
            job.error = str(error)
        jobs.append(job)
    return jobs


def _read(job: Job, line: str, params: SamplingParams, chat: Mapping[str, Any]) -> None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"line is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise RequestError(f"line is {line.strip()!r:.80}; it must be a JSON object")
    job.id = record.pop("id", None)
    given = [name for name in PROMPT_FIELDS if name in record]
    if len(given) != 1:
        raise RequestError(f"line has {' and '.join(given) or 'no prompt'}; give one of {', '.join(PROMPT_FIELDS)}")
    name, value = given[0], record.pop(given[0])
    settings = {field: record.pop(field) for field in CHAT_FIELDS if field in record}
    if name == "messages":
        if not isinstance(value, list):
            raise RequestError(f"messages is {value!r:.80}; it must be a list of messages")
        job.messages, job.chat = value, {**chat, **settings}
    elif settings:
        raise RequestError(f"{', '.join(settings)} can only be given with messages")
    else:
        images = {field: record.pop(field) for field in ("images",) if field in record}
        job.prompt = {name: value, **images}
    job.params = merge_params(params, record)


def answer(llm: LLM, jobs: Sequence[Job], *, progress: bool | None = None) -> None:
    """Fill in `output` or `error` of every job; one failing job does not hold up the others."""
    _generate(llm, [job for job in jobs if job.error is None and job.messages is None], progress)
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.error is None and job.messages is not None:
            groups.setdefault(json.dumps(job.chat, sort_keys=True), []).append(job)
    for group in groups.values():
        _chat(llm, group, progress)


def _generate(llm: LLM, jobs: list[Job], progress: bool | None) -> None:
    if jobs:
        prompts: list[Any] = [job.prompt for job in jobs]
        _store(jobs, llm.generate(prompts, [job.params for job in jobs], progress=progress))


def _chat(llm: LLM, jobs: list[Job], progress: bool | None) -> None:
    """Jobs of the same chat settings."""
    conversations: list[Any] = [job.messages for job in jobs]
    try:
        outputs = llm.chat(conversations, [job.params for job in jobs], **jobs[0].chat, progress=progress)
    except RequestError as error:
        for job in jobs:
            job.error = str(error)
        return
    _store(jobs, outputs)


def _store(jobs: list[Job], outputs: Sequence[RequestOutput]) -> None:
    for job, output in zip(jobs, outputs, strict=True):
        job.output = output
        job.error = next((answer.error for answer in output.outputs if answer.error is not None), None)
