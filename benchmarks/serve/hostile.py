"""Hostile clients: bodies of every wrong kind, and streams that are dropped at random points.

    python benchmarks/serve/hostile.py --bodies 10000 --drops 200

Prints status counts, memory before and after, and how long the engine's blocks took to be free. Exits 1 if a
body got anything but a 4xx (or a 200 for one that is right after all), or the engine is not as it was.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import socket
import sys
import time
from typing import Any

import httpx2 as httpx
from server import Server, running

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/generate": {"prompt": "a", "max_tokens": 1},
    "/abort": {"request_id": "x"},
}
FIELDS = (
    "messages", "prompt", "input", "system", "tools", "tool_choice", "response_format", "temperature", "top_p", "top_k",
    "min_p", "n", "stop", "stop_token_ids", "max_tokens", "logprobs", "top_logprobs", "logit_bias", "seed", "stream",
    "stream_options", "structured_outputs", "guided_json", "guided_regex", "so_args", "thinking", "reasoning_effort",
    "chat_template_kwargs", "bad_words", "allowed_token_ids", "golden_token_ids", "priority", "request_id", "text",
    "reasoning", "output_config", "prompt_logprobs", "echo", "best_of", "tokens", "model", "continue_final_message",
)  # fmt: skip


def value(depth: int = 0) -> Any:
    """A random JSON value, huge or strange as often as not."""
    kinds = ["number", "text", "word", "list", "object"] if depth < 4 else ["number", "text", "word"]
    match random.choice(kinds):
        case "number":
            return random.choice([0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e-320, 7])
        case "text":
            return random.choice(
                [
                    "",
                    "a",
                    "\x00",
                    "\ud800",
                    "😀" * 50,
                    "x" * 5000,
                    "<｜User｜>",
                    "user",
                    "auto",
                    "required",
                    "json_schema",
                ]
            )
        case "word":
            return random.choice([None, True, False])
        case "list":
            return [value(depth + 1) for _ in range(random.choice([0, 1, 3, 40]))]
    names = ["type", "role", "content", "name", "function", "schema", "json", "regex", "a", "text", "parameters"]
    return {random.choice(names): value(depth + 1) for _ in range(random.choice([0, 1, 3]))}


def body() -> tuple[str, bytes]:
    """(path, a body that is wrong in some way, mostly)."""
    path, plain = random.choice([*BODIES.items()])
    kind = random.random()
    if kind < 0.75:
        fields = plain | {random.choice(FIELDS): value() for _ in range(random.randint(1, 3))}
        return path, json.dumps(fields).encode()
    if kind < 0.85:
        text = json.dumps(plain).encode()
        start = random.randrange(len(text))
        return path, text[:start] + random.randbytes(random.randint(1, 8)) + text[start + random.randint(0, 5) :]
    if kind < 0.95:
        name, depth = random.choice(FIELDS), random.choice([50, 100, 10_000])
        opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return path, b'{"%s":' % name.encode() + opening * depth + b"1" + closing * depth + b"}"
    return path, random.choice([b"", b"null", b"[]", b"\xff\xfe", b"{" * 100, b'{"n":' + b"9" * 10_000 + b"}", b"NaN"])


def fuzz(server: Server, count: int) -> bool:
    memory, started = [], time.monotonic()
    statuses: collections.Counter[int] = collections.Counter()
    is_sound = True
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for number in range(count):
            path, data = body()
            if number % 1000 == 999:
                data = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
            try:
                response = client.post(path, content=data)
            except (httpx.WriteError, httpx.ReadError):  # refused before all of it was sent
                statuses[413] += 1
                continue
            statuses[response.status_code] += 1
            if response.status_code >= 500 or "Traceback" in response.text:
                is_sound = False
                print(response.status_code, path, data[:300], response.text[:300])
            if number % (count // 10) == 0:
                memory.append(server.memory_mib())
    print(f"{count} bodies in {time.monotonic() - started:.0f} s: {dict(sorted(statuses.items()))}")
    print(f"memory (web, engine) MiB by tenths: {[*memory, server.memory_mib()]}")
    print(f"idle after {server.seconds_until_idle():.2f} s; restarts {server.metric('deepinfer:engine_restarts'):.0f}")
    return is_sound and server.metric("deepinfer:engine_restarts") == 0


def drop(server: Server, count: int) -> bool:
    """Streams, 16 at a time, each dropped at a random point; the time until all blocks are free."""
    host, port = server.url.removeprefix("http://").split(":")
    slowest = 0.0
    for start in range(0, count, 16):
        clients = []
        for _ in range(min(16, count - start)):
            ask = {"prompt": "a " * random.randint(1, 300), "max_tokens": 1000, "ignore_eos": True, "stream": True}
            data = json.dumps(ask).encode()
            client = socket.create_connection((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            clients.append(client)
        for client in clients:
            time.sleep(random.choice([0, 0.01, 0.1]))
            client.close()
        slowest = max(slowest, server.seconds_until_idle())
    print(f"{count} streams dropped: running = 0 and all blocks free after at most {slowest:.2f} s")
    return slowest < 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--drops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    with running("--max-model-len", "2048", "--request-seconds", "100") as server:
        is_sound = fuzz(server, args.bodies)
    with running() as server:
        is_sound &= drop(server, args.drops)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
