"""`/v1/responses` as the official client sees it."""

import json

import openai
import pytest

from serve_client import wait_until

ASK = {"model": "deepinfer-nano", "input": "What is 12 + 30?"}
LONG = {"model": "deepinfer-nano", "input": "Count.", "max_output_tokens": 8000, "extra_body": {"ignore_eos": True}}


def test_an_answer_has_reasoning_text_and_usage(client):
    answer = client.responses.create(**ASK)
    assert answer.output_text == "42" and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage.output_tokens > answer.usage.output_tokens_details.reasoning_tokens > 0
    assert client.responses.retrieve(answer.id).output_text == "42"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_stream_gives_the_same_answer(client):
    whole = client.responses.create(**ASK)
    events = [*client.responses.create(**ASK, stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "42"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert events[-1].response.output_text == "42" and events[-1].response.usage == whole.usage


TOLD = {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 40, "metadata": {"ticket": "7"}}


@pytest.mark.parametrize(("sent", "told"), [
    ({**TOLD, "parallel_tool_calls": False, "store": False},
     {**TOLD, "parallel_tool_calls": False, "store": False, "background": False}),
    ({}, {"max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "store": True, "background": False}),
])  # fmt: skip
def test_an_answer_and_each_event_with_it_repeat_what_was_asked(client, sent, told):
    whole = client.responses.create(**ASK, **sent)
    held = [
        event.response for event in client.responses.create(**ASK, **sent, stream=True) if hasattr(event, "response")
    ]
    assert len(held) >= 3
    for answer in (whole, *held):
        assert {name: getattr(answer, name) for name in told} == told
    if told["store"]:
        assert client.responses.retrieve(whole.id).metadata == told["metadata"]


def test_an_answer_cut_by_length_is_incomplete(client):
    answer = client.responses.create(**ASK, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


def test_structured_output_follows_its_schema(client):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}
    answer = client.responses.create(**ASK, text={"format": form}, reasoning={"effort": "none"})
    assert isinstance(json.loads(answer.output_text)["sum"], int)


def test_a_background_answer_is_retrieved_and_cancelled_while_it_runs(client, server):
    started = client.responses.create(**LONG, background=True)
    assert started.status == "in_progress" and started.background
    assert client.responses.retrieve(started.id).status == "in_progress"
    assert client.responses.cancel(started.id).status == "cancelled"
    wait_until(server.is_idle)
    assert client.responses.retrieve(started.id).status == "cancelled"


def test_a_background_answer_completes_by_itself(client):
    started = client.responses.create(**ASK, background=True)
    wait_until(lambda: client.responses.retrieve(started.id).status != "in_progress")
    assert client.responses.retrieve(started.id).output_text == "42"


def test_a_stream_that_is_cancelled_says_so(client, server):
    stream = client.responses.create(**LONG, stream=True)
    first = next(iter(stream))
    client.responses.cancel(first.response.id)
    assert [*stream][-1].response.status == "cancelled"
    wait_until(server.is_idle)


def test_an_answer_that_is_not_stored_is_forgotten(client):
    answer = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError, match="is not here"):
        client.responses.retrieve(answer.id)


def test_an_answer_is_not_streamed_again(client):
    answer = client.responses.create(**ASK, include=["reasoning.encrypted_content"])
    with pytest.raises(openai.BadRequestError, match="stream is set"):
        client.responses.retrieve(answer.id, stream=True)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


def test_the_answers_of_other_keys_are_not_found(null):
    with null.openai("first-key") as first, null.openai("second-key") as second:
        answer = first.responses.create(model="deepinfer-nano", input="a", max_output_tokens=2)
        assert first.responses.retrieve(answer.id).id == answer.id
        for ask in (second.responses.retrieve, second.responses.cancel, second.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(answer.id)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is set"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\[0\] refers to an item of an earlier answer"),
        ({"prompt": {"id": "p"}}, "prompt is set, but this server keeps no prompts"),
        ({"include": ["message.output_text.logprobs"]}, "include has 'message.output_text.logprobs'"),
        ({"include": "reasoning.encrypted_content"}, "include is 'reasoning.encrypted_content'; it must be a list"),
        ({"top_logprobs": 3}, "top_logprobs is set"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type is 'web_search'; this server runs no tools itself"),
        ({"background": True, "stream": True}, "stream and background"),
        ({"input": []}, "refused"),
        ({"max_output_tokens": -1}, "max_tokens is -1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/x.png"}]}]},
         "downloads no images"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]},
         "Unsupported image_url"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.responses.create(**ASK | options)
