"""`/v1/chat/completions` as the official client sees it."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
QUIET = {"extra_body": {"thinking": {"type": "disabled"}}}
MODEL = "deepinfer-nano"
LETTERS = [67, 68, 69, 70, 223, 1]  # a, b, c, d, space and the end


def test_an_answer_has_thinking_content_usage_and_a_reason(client):
    answer = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == "42"
    assert choice.message.reasoning_content and choice.message.reasoning == choice.message.reasoning_content
    assert choice.finish_reason == "stop" and choice.stop_reason is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("chatcmpl-") and answer.model == MODEL


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_same_answer_in_pieces(server, n):
    body = {"messages": SUM, "seed": 5, "n": n, "temperature": 0.7, "max_tokens": 40}
    whole = server.post("/v1/chat/completions", **body).json()
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        for name in ("content", "reasoning_content"):
            text = "".join(one["delta"].get(name, "") for one in mine)
            assert text == choice["message"].get(name, "")
        reasons = [one["finish_reason"] for one in mine if one["finish_reason"]]
        assert reasons == [choice["finish_reason"]] and mine[-1]["finish_reason"]
    assert all(event["usage"] is None for event in events)
    assert {event["id"] for event in [*events, last]} == {last["id"]}


def test_the_client_reads_a_stream(client):
    chunks = [*client.chat.completions.create(model=MODEL, messages=SUM, stream=True, temperature=0, **QUIET)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"
    assert all(chunk.usage is None for chunk in chunks)


def test_length_is_told_and_max_completion_tokens_counts(client):
    answer = client.chat.completions.create(model=MODEL, messages=SUM, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


def test_stop_strings_act_on_the_visible_answer_alone(server):
    body = {"messages": SUM, "temperature": 0, "stop": ["2"]}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["message"]["content"] == "4" and "2" in choice["message"]["reasoning_content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "2")
    events = server.events("/v1/chat/completions", **body)[:-1]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "4"
    choice = server.post("/v1/chat/completions", **body, stop_in_thinking=True).json()["choices"][0]
    assert "2" not in choice["message"].get("reasoning_content", "") and choice["message"]["content"] == ""
    assert choice["stop_reason"] == "2"
    assert server.is_idle()


def test_logprobs_cover_every_token(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, temperature=0, logprobs=True, top_logprobs=2, **QUIET
    )
    lines = answer.choices[0].logprobs.content
    assert len(lines) == answer.usage.completion_tokens
    assert [line.token for line in lines] == ["4", "2", "<｜end▁of▁sentence｜>"]
    assert all(line.top_logprobs[0].logprob >= line.top_logprobs[1].logprob for line in lines)
    assert bytes(lines[0].bytes).decode() == "4" == lines[0].top_logprobs[0].token


def test_token_ids_come_on_request(server):
    body = {"messages": SUM, "temperature": 0, "return_token_ids": True, "thinking": {"type": "disabled"}}
    whole = server.post("/v1/chat/completions", **body).json()
    events = server.events("/v1/chat/completions", **body)[:-1]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert events[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"] and len(streamed) == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "extra",
    [
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_can_be_switched_off_by_every_name(server, extra):
    answer = server.post("/v1/chat/completions", messages=SUM, temperature=0, **extra).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "42"}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_extra_sampling_fields_are_read_by_their_declared_names(server):
    body = {"messages": SUM, "enable_thinking": False, "max_tokens": 3}
    forced = server.post("/v1/chat/completions", **body, golden_token_ids=[10, 11], return_token_ids=True).json()
    assert forced["choices"][0]["token_ids"] == [10, 11]
    guided = server.post("/v1/chat/completions", **body, guided_choice=["no", "on"]).json()
    assert guided["choices"][0]["message"]["content"] in ("no", "on")
    refused = server.post("/v1/chat/completions", **body, min_p=7)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_p"


def test_a_salt_parts_what_is_remembered_of_answers(server):
    """Under the regex the answer is in other tokens than its text; only the same salt brings these back."""
    body = {"messages": SUM, "enable_thinking": False, "structured_outputs": {"regex": "a b c d"}, "cache_salt": "mine"}
    answer = server.post("/v1/chat/completions", **body, allowed_token_ids=LETTERS, return_token_ids=True).json()
    told = {"messages": [*SUM, answer["choices"][0]["message"], *SUM], "enable_thinking": False}
    begun = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    prompts = [server.post("/tokenize", **told, **salt).json()["tokens"] for salt in ({"cache_salt": "mine"}, {})]
    assert [prompt[: len(begun)] == begun for prompt in prompts] == [True, False]
    for bad in (7, "x" * 2000):
        refused = server.post("/v1/chat/completions", messages=SUM, cache_salt=bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_the_last_message_is_continued(server):
    messages = [*SUM, {"role": "assistant", "content": "4"}]
    body = {"messages": messages, "temperature": 0, "enable_thinking": False, "continue_final_message": True}
    assert server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"] == "2"


@pytest.mark.parametrize("url", ["http://169.254.169.254/x.png", "https://10.0.0.1/x.png", "file:///etc/passwd"])
def test_an_image_that_is_not_in_the_body_is_refused_by_its_place(client, url):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "messages", "must be a list"),
        ({"messages": []}, 400, "messages", "messages is empty"),
        ({"messages": SUM, "temperature": -1}, 400, "temperature", "temperature is -1"),
        ({"messages": SUM, "max_tokens": 10**6}, 400, "max_tokens", "max_tokens is 1000000"),
        ({"messages": SUM, "n": 129}, 400, "n", "must be between 1 and 128"),
        ({"messages": SUM, "model": "gpt-4"}, 404, "model", "model 'gpt-4' is not here"),
        ({"messages": SUM, "stream": "yes"}, 400, None, "stream is 'yes'"),
        ({"messages": SUM, "stream_options": {"include_usage": True}}, 400, "stream_options", "stream is not"),
        ({"messages": SUM, "functions": [{"name": "f"}]}, 400, "functions", "give tools"),
        ({"messages": SUM, "web_search_options": {"a": 1}}, 400, "web_search_options", "searches nothing"),
        ({"messages": SUM, "modalities": ["text", "audio"]}, 400, "modalities", "answers are text"),
        ({"messages": SUM, "skip_special_tokens": False}, 400, "skip_special_tokens", "return_token_ids"),
        ({"messages": SUM, "separate_reasoning": False}, 400, "separate_reasoning", "never part of the content"),
        ({"messages": SUM, "add_generation_prompt": False}, 400, "add_generation_prompt", "continue_final_message"),
        ({"messages": SUM, "tools": 3}, 400, None, "chat request refused"),
        (
            {"messages": SUM, "structured_outputs": {"json": {}}, "guided_regex": "a"},
            400,
            "structured_outputs",
            "twice",
        ),
        ({"messages": SUM, "structured_outputs": {"regex": "("}, "stream": True}, 400, None, "regex"),
        ({"messages": SUM, "priority": "high"}, 400, "priority", "priority is 'high'"),
        ({"messages": SUM, "prompt_logprobs": 1}, 400, "prompt_logprobs", "a chat has no place for them"),
    ],
)
def test_a_refusal_has_a_status_and_names_the_parameter(server, body, status, param, words):
    response = server.post("/v1/chat/completions", **body)
    error = response.json()["error"]
    assert response.status_code == status and words in error["message"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and ".py" not in response.text


def test_thinking_can_be_left_out_of_the_answer(server):
    body = {"messages": SUM, "temperature": 0, "seed": 1}
    shown = server.post("/v1/chat/completions", **body).json()
    hidden = server.post("/v1/chat/completions", **body, include_reasoning=False).json()
    told = dict(shown["choices"][0]["message"])
    assert told.pop("reasoning") and told.pop("reasoning_content")
    assert hidden["choices"][0]["message"] == told and hidden["usage"] == shown["usage"]
    *events, _ = server.events("/v1/chat/completions", **body, include_reasoning=False)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == told["content"]
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("path", "ask"), [("/v1/chat/completions", {"messages": SUM}), ("/v1/completions", {"prompt": "a"})]
)
def test_each_chunk_tells_the_usage_so_far_if_it_shall(server, path, ask):
    wish = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = server.events(path, **ask, max_tokens=8, temperature=0, stream_options=wish)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 8
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}


def test_the_request_id_is_echoed_and_duplicates_are_safe(server):
    """Also two at a time."""
    body, headers = {"messages": SUM, "max_tokens": 30, "seed": 1}, {"x-request-id": "same"}
    with ThreadPoolExecutor() as pool:
        ask = partial(server.http.post, "/v1/chat/completions", json=body, headers=headers)
        answers = [future.result() for future in [pool.submit(ask) for _ in range(2)]]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert len(server.http.get("/version", headers={"x-request-id": "bad id"}).headers["x-request-id"]) == 32


def test_unicode_is_never_split(server):
    body = {"messages": SUM, "enable_thinking": False, "max_tokens": 40, "structured_outputs": {"regex": "éж{2}漢"}}
    events = server.events("/v1/chat/completions", **body)[:-1]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == "éжж漢" and all("\ufffd" not in piece for piece in pieces)
    whole = server.post("/v1/chat/completions", **body).json()
    assert whole["choices"][0]["message"]["content"] == "éжж漢"
