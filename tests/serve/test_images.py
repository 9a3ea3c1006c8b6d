"""Images through the three protocols: the small model's picture questions, by the official clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deepinfer

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
MODEL = "deepinfer-nano"


RAW = "<｜begin▁of▁sentence｜><｜User｜><｜image｜>Which digit is this?<｜Assistant｜></think>"


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


def test_raw_prompts_bring_their_images(server):
    for url, digit in digits()[:3]:
        body = {"images": [url], "temperature": 0, "max_tokens": 8}
        answer = server.post("/generate", prompt=RAW, **body).json()
        assert answer["text"] == digit
        ids = server.post("/tokenize", prompt=RAW).json()["tokens"]
        assert len(answer["prompt_token_ids"]) > len(ids) + 9
        assert server.post("/generate", prompt_token_ids=ids, **body).json()["token_ids"] == answer["token_ids"]
        for prompt in (RAW, [RAW], ids, [ids]):
            assert server.post("/v1/completions", prompt=prompt, **body).json()["choices"][0]["text"] == digit


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("images", "told"),
    [
        (["/etc/hostname"], "images[0] is '/etc/hostname'; it must be a data URL"),
        (["file:///etc/hostname"], "images[0] is 'file:///etc/hostname'; it must be a data URL"),
        (["https://example.org/a.png"], "it must be a data URL"),
        ([7], "images[0] is 7; it must be a data URL"),
        ([{"image": "a"}], "it must be a data URL"),
        ("data:image/png;base64,AAAA", "it must be a list"),
        (["data:image/png;base64,AAAA"], "images[0] is no image"),
        ([], "prompt has 1 image placeholders"),
        (["data:,"] * 2, "but 2 images are given"),
    ],
)
def test_raw_prompts_reach_neither_network_nor_files(server, path, images, told):
    reply = server.post(path, prompt=RAW, images=images)
    assert reply.status_code == 400 and told in reply.json()["error"]["message"]


def test_images_stand_beside_one_prompt(server):
    url, _ = digits()[0]
    reply = server.post("/v1/completions", prompt=[RAW, RAW], images=[url])
    assert reply.status_code == 400 and "images are given beside 2 prompts" in reply.json()["error"]["message"]


def asked(url: str) -> list[dict]:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "text", "text": "Which digit is this?"}, {"type": "image", "source": source}]
    return [{"role": "user", "content": content}]


def test_prompts_are_counted_with_the_positions_of_their_images(server):
    url, _ = digits()[0]
    with server.anthropic() as claude:
        answer = claude.messages.create(model=MODEL, messages=asked(url), max_tokens=1)
        counted = claude.messages.count_tokens(model=MODEL, messages=asked(url))
    assert counted.input_tokens == answer.usage.input_tokens
    content = [{"type": "text", "text": "Which digit is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    chat = [{"role": "user", "content": content}]
    reply = server.post("/v1/chat/completions", messages=chat, max_tokens=1, return_token_ids=True).json()
    assert server.post("/tokenize", messages=chat).json()["tokens"] == reply["prompt_token_ids"]


def test_max_tokens_is_lowered_to_what_fits_behind_images(server):
    url, _ = digits()[0]
    body = {
        "model": MODEL,
        "messages": asked(url),
        "max_tokens": 10**6,
        "temperature": 0,
        "thinking": {"type": "disabled"},
    }
    reply = server.post("/v1/messages", **body)
    assert reply.status_code == 200 and reply.json()["usage"]["output_tokens"] < 100


def test_answers_about_images_come_back_in_their_tokens(server):
    """The next turn's prompt begins with the tokens of this one and its answer, however they spell."""
    url, _ = digits()[0]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    body = {"thinking": {"type": "disabled"}, "return_token_ids": True}
    pieces = [server.post("/tokenize", prompt=text).json()["tokens"] for text in ("d", "og", "<｜end▁of▁sentence｜>")]
    answer_ids = [*pieces[0], *pieces[1], *pieces[2]]
    first = server.post("/v1/chat/completions", messages=messages, golden_token_ids=answer_ids, **body).json()
    answer = first["choices"][0]
    messages += [{"role": "assistant", "content": answer["message"]["content"]}, {"role": "user", "content": "Sure?"}]
    second = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **body).json()
    begun = first["prompt_token_ids"] + answer_ids
    assert second["prompt_token_ids"][: len(begun)] == begun
