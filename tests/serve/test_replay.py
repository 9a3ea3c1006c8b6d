"""Recorded tool calls, replayed in pieces of every size: the same arguments, valid JSON, no markup in the content."""

import json
import random

import deepseek_recipe as recipe
import pytest

from deepinfer.checkpoint.hub import BUNDLED
from deepinfer.frontend.chat import ChatEncoder

MARK = "｜DSML｜"
VALUES = [
    "plain",
    "a>",
    "b<",
    "c</",
    "ls 2>&1",
    "<b>x</b>",
    "</｜",
    '}"\\',
    "é😀漢",
    "",
    "line\nline\n",
    "<｜DSML",
]
SIZES = [1, 2, 3, 7, 17, None]  # None: random
TOOL = {"name": "run", "description": "Run it.", "parameters": {"type": "object", "properties": {
    "command": {"type": "string"}, "count": {"type": "integer"}}}}  # fmt: skip


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(BUNDLED / "tokenizer.json")


PARAMETER, INVOKE, CALLS = (f"</{MARK} {name}>" for name in ("parameter", "invoke", "calls"))


def written(values):
    """An answer that thinks, says something, and calls the tool once for each value."""
    calls = "".join(
        f'<{MARK} invoke name="run">\n<{MARK} parameter name="command" string="true">{value}{PARAMETER}\n'
        f'<{MARK} parameter name="count" string="false">{number}{PARAMETER}\n{INVOKE}\n'
        for number, value in enumerate(values)
    )
    return f"I run it.</think>On my way.\n\n<{MARK} calls>\n{calls}{CALLS}"


def pieces(text, size):
    random.seed(len(text))
    while text:
        count = size or random.randint(1, 24)
        yield text[:count]
        text = text[count:]


def chat(encoder, text, size):
    """(thinking, content, arguments of the calls), and the same put together from deltas."""
    messages = [{"role": "user", "content": "go"}]
    parser = encoder.encode_body({"messages": messages, "tools": [{"type": "function", "function": TOOL}]}).parser()
    deltas = [*(parser.add(piece) for piece in pieces(text, size)), parser.finish()]
    streamed: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        streamed[call.index] = streamed.get(call.index, "") + call.arguments
    assert [*streamed.values()] == [call.arguments for call in parser.tool_calls]
    assert "".join(delta.content for delta in deltas) == parser.content
    return parser.reasoning, parser.content, [call.arguments for call in parser.tool_calls]


@pytest.mark.parametrize("size", SIZES)
def test_chat_calls_do_not_depend_on_the_pieces(encoder, size):
    reasoning, content, arguments = chat(encoder, written(VALUES), size)
    assert (reasoning, content.strip()) == ("I run it.", "On my way.") and MARK not in content
    assert [json.loads(text) for text in arguments] == [
        {"command": value, "count": number} for number, value in enumerate(VALUES)
    ]
    assert arguments == chat(encoder, written(VALUES), 4096)[2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("closer", [PARAMETER + "\n", INVOKE + "\n", CALLS])
@pytest.mark.parametrize("value", VALUES)
def test_a_missing_last_closer_changes_no_arguments(encoder, value, closer, size):
    text = written([value, value])
    start = text.rindex(closer)
    _, content, arguments = chat(encoder, text[:start] + text[start + len(closer) :], size)
    assert MARK not in content
    assert [json.loads(text) for text in arguments] == [{"command": value, "count": count} for count in (0, 1)]


@pytest.mark.parametrize("closer", [PARAMETER + "\n", INVOKE + "\n"])
def test_a_closer_missing_inside_gives_valid_json_whatever_the_pieces(encoder, closer):
    text = written(["ls 2>&1", "b"])
    start = text.index(closer)
    found = [chat(encoder, text[:start] + text[start + len(closer) :], size) for size in SIZES]
    assert all(one == found[0] for one in found) and MARK not in found[0][1]
    assert json.loads(found[0][2][-1])["command"] == "b"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_the_other_protocols_give_the_same_arguments(encoder, protocol, size):
    if protocol == "messages":
        tools = [{"name": "run", "description": "Run it.", "input_schema": TOOL["parameters"]}]
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 10, "tools": tools}
    else:
        body = {"input": "go", "tools": [{"type": "function", **TOOL}]}
    answers = encoder.encode_body(body, protocol).answers
    processor = answers.processor("id", "model", encoder.tokenizer, ())
    chunks = [recipe.InferenceChunk.text(piece) for piece in pieces(written(VALUES), size)]
    chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    events = [json.loads(event.to_json()) for chunk in chunks for event in processor.push(chunk)]
    if protocol == "messages":
        texts: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["partial_json"]
        found = [*texts.values()]
        starts = [event["index"] for event in events if event["type"] == "content_block_start"]
        assert starts == [*range(len(starts))]
    else:
        found = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [json.loads(text) for text in found] == [{"command": v, "count": n} for n, v in enumerate(VALUES)]
