"""`/v1/messages` as Anthropic's client sees it."""

import anthropic
import pytest

from waiting import PATIENCE

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
ASK = {"model": "deepinfer-nano", "max_tokens": 200, "messages": SUM}
QUIET = {"thinking": {"type": "disabled"}}


@pytest.fixture
def claude(server):
    with server.anthropic() as one:
        yield one


def test_thinking_comes_as_a_block_of_its_own(claude):
    answer = claude.messages.create(**ASK)
    thinking, text = answer.content
    assert (thinking.type, text.type, text.text) == ("thinking", "text", "42") and thinking.thinking
    assert answer.stop_reason == "end_turn" and answer.id.startswith("msg_")
    assert answer.usage.input_tokens == claude.messages.count_tokens(model=ASK["model"], messages=SUM).input_tokens
    assert answer.usage.output_tokens > 3


@pytest.mark.parametrize("options", [{}, QUIET, {"stop_sequences": ["2"]}, {"max_tokens": 3}])
def test_a_stream_gives_the_same_message(claude, options):
    whole = claude.messages.create(**ASK | options)
    with claude.messages.stream(**ASK | options) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.model_dump() for block in streamed.content] == [
        {**block.model_dump()} | ({"signature": streamed.id} if block.type == "thinking" else {})
        for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)


def test_stop_sequences_cut_the_visible_text_alone(claude):
    answer = claude.messages.create(**ASK, stop_sequences=["2"])
    assert answer.content[-1].text == "4" and "2" in answer.content[0].thinking
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "2")


def test_max_tokens_is_lowered_to_what_fits(claude):
    answer = claude.messages.create(**ASK | {"max_tokens": 64_000} | QUIET, timeout=PATIENCE)
    assert answer.content[0].text == "42"
    assert claude.messages.create(**ASK | {"max_tokens": 2}).stop_reason == "max_tokens"


def test_output_follows_a_schema(claude):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = claude.messages.create(**ASK | QUIET, extra_body={"output_config": config})
    assert answer.content[0].text.startswith("{") and '"sum"' in answer.content[0].text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "bob", "content": ""}]}, anthropic.BadRequestError, "unknown variant `bob`"),
        ({"model": "claude"}, anthropic.NotFoundError, "model 'claude' is not here"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature is -1"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens is 0"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
    ],
)
def test_errors_have_the_shape_of_the_protocol(claude, options, error, words):
    with pytest.raises(error) as caught:
        claude.messages.create(**ASK | options)
    assert caught.value.body["type"] == "error" and words in caught.value.body["error"]["message"]
    assert caught.value.request_id


def test_an_answer_goes_on_with_what_the_assistant_said_last(claude):
    answer = claude.messages.create(**ASK | {"messages": [*SUM, {"role": "assistant", "content": "4"}]})
    assert [block.text for block in answer.content] == ["2"]


def test_documents_and_typed_tools_of_the_client_are_taken(claude):
    source = {"type": "text", "media_type": "text/plain", "data": "What is 12 + 30?"}
    content = [{"type": "document", "source": source}]
    ask = ASK | QUIET | {"messages": [{"role": "user", "content": content}]}
    tool = {"type": "custom", "name": "f", "input_schema": {"type": "object"}}
    assert claude.messages.create(**ask).content[0].text == "42"
    plain = {name: value for name, value in tool.items() if name != "type"}
    counts = [claude.messages.count_tokens(model=ASK["model"], messages=SUM, tools=[one]) for one in (tool, plain)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "options", [{"mcp_servers": [{"type": "url", "name": "x", "url": "https://a.test"}]}, {"container": "c"}]
)
def test_tools_that_this_server_would_run_are_refused(claude, options):
    with pytest.raises(anthropic.BadRequestError, match="runs no tools itself"):
        claude.messages.create(**ASK, extra_body=options)


def test_an_image_that_is_no_image_is_refused_by_its_place(claude):
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    content = [{"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match=r"image 1 \(messages\.0\.content\[0\]\) is no image"):
        claude.messages.create(**ASK | {"messages": [{"role": "user", "content": content}]})


def test_a_wrong_key_is_an_authentication_error(null):
    with null.anthropic("wrong") as one, pytest.raises(anthropic.AuthenticationError, match="API key is missing"):
        one.messages.create(**ASK)
    with null.anthropic("second-key") as one:
        assert one.messages.count_tokens(model=ASK["model"], messages=SUM).input_tokens > 10


def test_a_client_that_asks_for_a_thread_goes_on_without_one(claude):
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        cities.append(city)
        return "sunny"

    ask = {"model": "deepinfer-nano", "max_tokens": 300, "messages": [{"role": "user", "content": "Weather in Paris?"}]}
    tools = {"tools": [get_weather], "tool_choice": {"type": "any"}}
    runner = claude.beta.messages.tool_runner(**ask, **tools, extra_body={"temperature": 0}, max_iterations=2)
    answers = list(runner)
    assert len(answers) == len(cities) == 2
    with pytest.raises(anthropic.BadRequestError, match="keeps no conversations"):
        claude.messages.create(**ASK, extra_body={"thread": {"type": "create"}})
