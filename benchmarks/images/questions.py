"""nano's picture questions on every way in: how many are right, beside the model card.

    PYTHONPATH=src:tests python benchmarks/images/questions.py [--limit 5] [--port 8765]

The 120 records of three skills, in three forms: *raw* is the card's prompt, the image behind the opening of the turn
and the question behind it, whole completion compared; *chat* is a message whose question comes first, as
`deepinfer chat` puts it, and *first* one whose image does, answers compared. In this process (`LLM`), by commands
(`generate --json`, `chat` with `/image`), and by a running `deepinfer serve` (`/generate`, `/v1/completions`, three
protocols). Greedy, so all ways of a form shall agree.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx

from deepinfer import LLM, SamplingParams
from deepinfer.cli.eval import NANO_EVAL, images_of, read_card, select_lines

SKILLS = ("image_digit", "image_count", "image_two_shapes")
END = "<｜end▁of▁sentence｜>"
MODEL = "deepinfer-nano"
COMMAND = [sys.executable, "-m", "deepinfer"]
MAX_TOKENS = 24  # the longest answer has 10
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}

Record = dict[str, Any]
Answers = list[str]


def question_of(record: Record) -> str:
    """The text beside the image."""
    content = record["request"]["messages"][0]["content"]
    return next(part["text"] for part in content if part["type"] == "text")


def asked(record: Record) -> list[dict[str, Any]]:
    """The conversation of a record, with the question first."""
    image = {"type": "image_url", "image_url": {"url": images_of(record)[0]}}
    return [{"role": "user", "content": [{"type": "text", "text": question_of(record)}, image]}]


def image_first(record: Record) -> list[dict[str, Any]]:
    """The same with the image first."""
    (message,) = asked(record)
    return [{**message, "content": message["content"][::-1]}]


def by_llm(records: list[Record]) -> dict[str, Answers]:
    params = SamplingParams(**GREEDY)
    prompts = [{"prompt": record["prompt"], "images": images_of(record)} for record in records]
    with LLM() as llm:
        raw = [output.text for output in llm.generate(prompts, params)]
        return {
            "raw LLM.generate": raw,
            "chat LLM.chat": [o.content for o in llm.chat(list(map(asked, records)), params)],
            "first LLM.chat": [o.content for o in llm.chat(list(map(image_first, records)), params)],
        }


def by_commands(records: list[Record]) -> dict[str, Answers]:
    lines = [{"prompt": record["prompt"], "images": images_of(record)} for record in records]
    chats = [{"messages": asked(record)} for record in records]
    flags = ["--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
    text = "\n".join(map(json.dumps, [*lines, *chats]))
    answers = [json.loads(line) for line in run(["generate", "--json", *flags], text).splitlines()]
    raw, chat = answers[: len(records)], answers[len(records) :]
    with tempfile.TemporaryDirectory() as folder:
        turns = []
        for number, record in enumerate(records):
            path = Path(folder, f"{number}.png")
            path.write_bytes(base64.b64decode(images_of(record)[0].partition(",")[2]))
            turns += [f"/image {path}", question_of(record), "/reset"]
        talk = run(["chat", *flags], "\n".join(turns))
    return {
        "raw deepinfer generate": [answer["text"] for answer in raw],
        "chat deepinfer generate": [answer["content"] for answer in chat],
        "chat deepinfer chat": talk.splitlines(),
    }


def run(arguments: list[str], text: str) -> str:
    """What a command prints."""
    done = subprocess.run([*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def by_server(records: list[Record], port: int) -> dict[str, Answers]:
    with served(port) as post:

        def each(path: str, body: Callable[[Record], dict[str, Any]], text: Callable[[Any], str]) -> Answers:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda record: text(post(path, {"model": MODEL, **body(record)})), records))

        raw, off = (
            (lambda record: {"prompt": record["prompt"], "images": images_of(record), **GREEDY}),
            {"type": "disabled"},
        )
        return {
            "raw /generate": each("/generate", raw, lambda answer: answer["text"]),
            "raw /v1/completions": each("/v1/completions", raw, lambda answer: answer["choices"][0]["text"]),
            "chat /v1/chat/completions": each(
                "/v1/chat/completions", lambda record: {"messages": asked(record), "thinking": off, **GREEDY},
                lambda answer: answer["choices"][0]["message"]["content"],
            ),
            "chat /v1/messages": each(
                "/v1/messages", lambda record: {"messages": for_messages(record), "thinking": off, **GREEDY},
                lambda answer: answer["content"][0]["text"],
            ),
            "chat /v1/responses": each(
                "/v1/responses", for_responses,
                lambda answer: answer["output"][0]["content"][0]["text"],
            ),
        }  # fmt: skip


def for_messages(record: Record) -> list[dict[str, Any]]:
    data = images_of(record)[0].partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return [{"role": "user", "content": [{"type": "text", "text": question_of(record)}, image]}]


def for_responses(record: Record) -> dict[str, Any]:
    text = {"type": "input_text", "text": question_of(record)}
    content = [text, {"type": "input_image", "image_url": images_of(record)[0]}]
    given = {"temperature": 0.0, "max_output_tokens": MAX_TOKENS, "reasoning": {"effort": "none"}}
    return {"input": [{"role": "user", "content": content}], **given}


@contextlib.contextmanager
def served(port: int) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
    """`deepinfer serve` in a process of its own; gives what posts a body and returns the answer's."""
    process = subprocess.Popen([*COMMAND, "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            until = time.monotonic() + 120
            while not is_ready(client):
                assert time.monotonic() < until and process.poll() is None, "the server did not start"
                time.sleep(0.2)

            def post(path: str, body: dict[str, Any]) -> Any:
                reply = client.post(path, json=body)
                assert reply.status_code == 200, reply.text
                return reply.json()

            yield post
    finally:
        process.terminate()
        process.wait(60)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def report(records: list[Record], ways: dict[str, Answers]) -> None:
    card = read_card(NANO_EVAL)
    assert card is not None, "nano ships with its card"
    card_right = {record["id"] for record in records} - card.misses
    print(f"{'':28}" + "".join(f"{skill:>18}" for skill in SKILLS) + f"{'all':>6}  off the card")
    print(line("model card", records, card_right))
    for name, answers in ways.items():
        assert len(answers) == len(records), f"{name}: {len(answers)} answers to {len(records)} questions"
        pairs = zip(records, answers, strict=True)
        right = {record["id"] for record, answer in pairs if answer == record["completion"].removesuffix(END)}
        print(line(name, records, right), " ", differences(right, card_right))


def line(name: str, records: list[Record], right: set[str]) -> str:
    counts = [sum(record["id"] in right for record in records if record["skill"] == skill) for skill in SKILLS]
    return f"{name:28}" + "".join(f"{count:>18}" for count in counts) + f"{sum(counts):>6}"


def differences(right: set[str], card_right: set[str]) -> str:
    signed = [f"-{name}" for name in sorted(card_right - right)] + [f"+{name}" for name in sorted(right - card_right)]
    return " ".join(signed) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="records of each skill")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    records = select_lines(NANO_EVAL.read_text(encoding="utf-8"), ",".join(SKILLS), args.limit)
    report(records, {**by_llm(records), **by_commands(records), **by_server(records, args.port)})


if __name__ == "__main__":
    main()
