import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend.answer import AnswerParser
from deepinfer.frontend.chat import ChatEncoder, ChatPrompt
from deepinfer.frontend.outputs import AnswerDelta

USER = {"role": "user", "content": "answer in json"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x "y"'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
KINDS = {
    "plain": {"thinking": False},
    "thinking": {"thinking": True},
    "tools": {"thinking": True, "tools": [TOOL]},
    "required": {"thinking": False, "tools": [TOOL], "tool_choice": "required"},
    "json": {"thinking": False, "response_format": {"type": "json_object"}},
}


@pytest.fixture(scope="module")
def prompts(nano) -> dict[str, ChatPrompt]:
    encoder = ChatEncoder(nano / "tokenizer.json")
    return {kind: encoder.encode([USER], **options) for kind, options in KINDS.items()}


def parse(prompt: ChatPrompt, *pieces: str) -> AnswerParser:
    """Parse, and check that the deltas together are the whole."""
    parser = prompt.parser()
    deltas = [parser.add(piece) for piece in pieces] + [parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == parser.reasoning
    assert "".join(delta.content for delta in deltas) == parser.content
    arguments = [""] * len(parser.tool_calls)
    for delta in deltas:
        for call in delta.tool_calls:
            arguments[call.index] += call.arguments
    assert arguments == [call.arguments for call in parser.tool_calls]
    return parser


def summary(parser: AnswerParser) -> tuple[str, str, list[tuple[str, str]]]:
    return parser.reasoning, parser.content, [(call.name, call.arguments) for call in parser.tool_calls]


def test_thinking_and_content_are_told_apart(prompts):
    assert summary(parse(prompts["thinking"], "I th", "ink</th", "ink>ans", "wer")) == ("I think", "answer", [])
    assert summary(parse(prompts["thinking"], "never done")) == ("never done", "", [])
    assert summary(parse(prompts["plain"], "just text")) == ("", "just text", [])


def test_a_markup_beginning_is_held_back_until_it_is_decided(prompts):
    parser = prompts["thinking"].parser()
    assert parser.add("a") == AnswerDelta(reasoning="a")
    assert parser.add("</thi") == AnswerDelta()
    assert parser.add("s") == AnswerDelta(reasoning="</this")
    assert parser.add("</thi") == AnswerDelta()
    assert parser.finish() == AnswerDelta(reasoning="</thi")


def test_tool_calls_are_parsed(prompts):
    parser = parse(prompts["tools"], "need f</think>Let me see.", CALL)
    assert summary(parser) == ("need f", "Let me see.", [("f", '{"a": "x \\"y\\""}')])
    assert json.loads(parser.tool_calls[0].arguments) == {"a": 'x "y"'}
    assert parser.tool_calls[0].id.startswith("call_")


def test_a_broken_off_tool_call_keeps_what_there_is(prompts):
    parser = parse(prompts["tools"], "</think>" + CALL[: CALL.index(' "y"')])
    assert [(call.name, call.arguments) for call in parser.tool_calls] == [("f", '{"a": "x')]


def test_tool_markup_without_tools_is_content(prompts):
    assert summary(parse(prompts["thinking"], "t</think>so" + CALL)) == ("t", "so" + CALL, [])


def test_text_around_json_is_dropped(prompts):
    assert parse(prompts["json"], 'Sure: ```json\n{"a": 1}\n``` done').content == '{"a": 1}'
    assert parse(prompts["json"], '{"a": "b  c"}').content == '{"a": "b  c"}'


PIECES = (
    [
        "\n",
        "\n\n",
        "<",
        ">",
        "<think>",
        "</think>",
        "｜DSML｜",
        " calls",
        "<｜DSML｜ calls>",
        '<｜DSML｜ invoke name="',
        "f",
    ]
    + [
        '"',
        '<｜DSML｜ parameter name="a" string="true">',
        "</｜DSML｜ parameter>",
        "</｜DSML｜ invoke>",
        "</｜DSML｜ calls>",
    ]
    + [
        "abc",
        " ",
        "{",
        "}",
        "```json",
        "```",
        "[1]",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "é",
        'string="false"',
        "\\",
    ]
    + ["\ufffd", "\0"]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=20), data=st.data())
def test_any_text_in_any_pieces_gives_one_answer(prompts, kind, parts, data):
    text, pieces = "".join(parts), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces.append(text[start:end])
    whole = summary(parse(prompts[kind], text))
    assert summary(parse(prompts[kind], *pieces)) == whole == summary(parse(prompts[kind], *text))


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 4095), max_size=30))
def test_random_tokens_never_raise(prompts, tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for prompt in prompts.values():
        parse(prompt, text)


class PanicException(BaseException):
    """Stands for what native code raises when it panics: no Exception, known by its name only."""


class FailingProcessor:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def push(self, _):
        raise self.error

    def finish(self):
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("closed"), PanicException("index out of range")], ids=["error", "panic"]
)
def test_a_failing_processor_leaves_plain_text(error, caplog):
    parser = AnswerParser(FailingProcessor(error))
    assert parser.add("a</think>") == AnswerDelta(content="a</think>")
    assert parser.add("b") == AnswerDelta(content="b")
    assert parser.finish() == AnswerDelta()
    assert parser.content == "a</think>b"
    assert f"the answer parser failed ({type(error).__name__}: {error})" in caplog.text
    assert AnswerParser(FailingProcessor(error)).finish() == AnswerDelta()


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        AnswerParser(FailingProcessor(KeyboardInterrupt())).add("a")


def test_one_prompt_gives_many_parsers(prompts):
    first, second = prompts["thinking"].parser(), prompts["thinking"].parser()
    first.add("a</think>b")
    second.add("c")
    assert (first.reasoning, first.content, second.reasoning, second.content) == ("a", "b", "c", "")
