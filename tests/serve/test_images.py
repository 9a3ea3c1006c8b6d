"""Images through the three protocols: the small model's picture questions, by the official clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deepinfer

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
MODEL = "deepinfer-nano"


def digits() -> list[tuple[str, str]]:
    """Data URL and digit of the first picture questions."""
    records = [json.loads(line) for line in EVAL.read_text().splitlines()]
    chosen = [record for record in records if record["skill"] == "image_digit"][:12]
    parts = [record["request"]["messages"][0]["content"] for record in chosen]
    urls = [next(part["image_url"]["url"] for part in content if part["type"] == "image_url") for content in parts]
    return list(zip(urls, (record["answer"] for record in chosen), strict=True))


def by_chat(client, url: str) -> str:
    content = [{"type": "text", "text": "Which digit is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"thinking": {"type": "disabled"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8, extra_body=body
    )
    assert answer.usage.prompt_tokens > 20
    return answer.choices[0].message.content


def by_messages(claude, url: str) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "text", "text": "Which digit is this?"}, {"type": "image", "source": source}]
    answer = claude.messages.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=8,
        thinking={"type": "disabled"}, extra_body={"temperature": 0},
    )  # fmt: skip
    return answer.content[0].text


def by_responses(client, url: str) -> str:
    content = [{"type": "input_text", "text": "Which digit is this?"}, {"type": "input_image", "image_url": url}]
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8,
        extra_body={"reasoning": {"effort": "none"}},
    )  # fmt: skip
    return answer.output_text


def test_the_three_protocols_see_the_same_pictures(server, client):
    asked = digits()
    answers = [by_chat(client, url) for url, _ in asked]
    assert sum(answer == digit for answer, (_, digit) in zip(answers, asked, strict=True)) >= 9
    with server.anthropic() as claude:
        assert [by_messages(claude, url) for url, _ in asked] == answers
    assert [by_responses(client, url) for url, _ in asked] == answers


def test_an_image_that_is_spelled_with_escapes_is_seen_too(server, client):
    url, _ = digits()[0]
    content = [{"type": "text", "text": "Which digit is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, "thinking": {"type": "disabled"}}
    text = json.dumps(body | {"messages": [{"role": "user", "content": content}]})
    data = text.replace("image", "im\\u0061ge").encode()
    reply = server.http.post("/v1/chat/completions", content=data, headers={"content-type": "application/json"})
    assert reply.json()["choices"][0]["message"]["content"] == by_chat(client, url)


@pytest.mark.parametrize("data", ["", "AAAA", "iVBORw0KGgoAAAANSUhEUg=="])
def test_a_damaged_image_fails_its_request_alone(server, data):
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    reply = server.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
    assert reply.status_code == 400 and "messages[0]" in reply.json()["error"]["message"]
    assert server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}]).status_code == 200
