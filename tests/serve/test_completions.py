"""`/v1/completions` as the official client sees it."""

import pytest

MODEL = "deepinfer-nano"


def test_texts_and_token_ids_are_continued(client, server):
    ids = server.post("/tokenize", prompt="Once upon").json()["tokens"]
    text = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=5)
    same = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=5)
    assert text.choices[0].text == same.choices[0].text != ""
    assert text.usage.prompt_tokens == len(ids) and text.usage.completion_tokens == 5
    assert text.choices[0].finish_reason == "length" and text.id.startswith("cmpl-")


def test_sixteen_tokens_are_the_default(client):
    answer = client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_several_prompts_with_several_answers_keep_their_order(client):
    ask = {"model": MODEL, "prompt": ["One two three", "A B C D"], "n": 2, "seed": 3, "temperature": 1, "max_tokens": 4}
    together = client.completions.create(**ask)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = client.completions.create(**ask | {"prompt": "A B C D"})
    assert [choice.text for choice in together.choices[2:]] == [choice.text for choice in alone.choices]
    assert together.usage.completion_tokens == 16 and together.usage.prompt_tokens == alone.usage.prompt_tokens + 4


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 2, "n": 2}])
def test_a_stream_is_the_same_answer_in_pieces(server, options):
    body = {"prompt": "Once upon", "seed": 3, "temperature": 1, "max_tokens": 6, "return_token_ids": True, **options}
    whole = server.post("/v1/completions", **body).json()
    events = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]" and events.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert sum((one["token_ids"] for one in mine), []) == choice["token_ids"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
        if "logprobs" in options:
            for name, lines in choice["logprobs"].items():
                assert sum((one["logprobs"][name] for one in mine), []) == lines


def test_echo_gives_the_prompt_with_its_logprobs(server):
    body = {"prompt": "Once upon", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    lines = choice["logprobs"]
    assert choice["text"].startswith("Once upon") and "".join(lines["tokens"]) == choice["text"]
    assert lines["token_logprobs"][0] is None and all(value < 0 for value in lines["token_logprobs"][1:])
    for start, token in zip(lines["text_offset"], lines["tokens"], strict=True):
        assert choice["text"][start:].startswith(token)


def test_equal_prompts_count_each(client):
    ask = {"model": MODEL, "max_tokens": 1}
    one, two = (client.completions.create(**ask, prompt=prompt).usage for prompt in ("A B", ["A B", "A B"]))
    assert two.prompt_tokens == 2 * one.prompt_tokens


def test_stop_strings_and_stop_tokens_end_a_text(server):
    body = {"prompt": "One, two", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    stop = text[3:6]
    cut = server.post("/v1/completions", **body, stop=stop).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    ids = server.post("/v1/completions", **body, return_token_ids=True).json()["choices"][0]["token_ids"]
    ended = server.post("/v1/completions", **body, stop_token_ids=[ids[2]]).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", ids[2])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix is set"),
        ({}, "prompt is None"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [1, "a"]}, "whole number"),
        ({"prompt": [[1], [10**9]]}, "prompt holds token id"),
        ({"prompt": ["a"] * 65, "n": 2, "temperature": 1}, "130 answers, at most 128"),
        ({"prompt": "a", "best_of": 3}, "best_of is 3"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs is set; set echo"),
    ],
)
def test_what_cannot_be_continued_is_refused(server, body, words):
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_text_without_a_utf8_form_is_refused(server):
    response = server.http.post("/v1/completions", content=rb'{"prompt": "a\ud800"}')
    assert response.status_code == 400 and "lone surrogate" in response.json()["error"]["message"]
