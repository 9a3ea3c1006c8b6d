"""Which answers the tools of a body leave open, under the grammar that is made of them."""

import pytest

from deepinfer.frontend.tool_choice import ToolChoice, split_tool_choice
from grammar_walker import Walker

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
STRICT = {"name": "weather", "parameters": CITY, "strict": True}
LOOSE = {"name": "time", "parameters": CITY}
FORM = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


def call(name, **values):
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{value}'
        "</｜DSML｜ parameter>\n"
        for key, value in values.items()
    ]
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(lines)}</｜DSML｜ invoke>\n'


def block(*calls):
    return f"\n\n<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"


GOOD, BAD = call("weather", city="Paris", days=2), call("weather", city="Paris")
LATE, ODD = call("time", city="Paris", days=2), call("time", zone="UTC")


@pytest.fixture(scope="module")
def accepts():
    walker = Walker()

    def accepts(grammar, text):
        return walker.accepts({grammar.kind: grammar.text}, text)

    return accepts


OFFERED, SINGLE = ToolChoice(), ToolChoice(is_single=True)
DEMANDED, NAMED = ToolChoice(is_demanded=True), ToolChoice(is_demanded=True, name="weather", is_single=True)


@pytest.mark.parametrize(
    ("choice", "form", "taken", "refused"),
    [
        (OFFERED, None,
         ["", "It rains.", "Well." + block(GOOD), block(GOOD, GOOD), block(ODD, GOOD), "a < b", "<｜DSML｜ cal"],
         [block(BAD), block(GOOD, BAD), "Well." + block(BAD), block(GOOD) + "more", block(), block(call("rain"))]),
        (SINGLE, None, ["It rains.", block(GOOD), block(ODD)], [block(GOOD, GOOD), block(ODD, GOOD), block(BAD)]),
        (OFFERED, FORM, ['{"a": 1}', block(GOOD), block(ODD)], ["", "It rains.", block(BAD), '{"a": 1}' + block(GOOD)]),
        (OFFERED, {"regex": "a.b"}, ["axb", block(GOOD)], ["a\nb", "ab", block(BAD)]),
        (OFFERED, {"json_object": True}, ["{}", block(GOOD)], ["[]", block(BAD)]),
        (DEMANDED, None, [block(GOOD), block(LATE, GOOD)], ["", "It rains.", "Well." + block(GOOD), block(BAD)]),
        (DEMANDED, None, [block(LATE)], [block(ODD)]),
        (DEMANDED, FORM, [block(GOOD)], ['{"a": 1}']),
        (NAMED, None, [block(GOOD)], [block(LATE), block(GOOD, GOOD)]),
    ],
)  # fmt: skip
def test_the_grammar_takes_what_may_be_called(accepts, choice, form, taken, refused):
    grammar = choice.grammar([STRICT, LOOSE], form)
    assert [text for text in taken if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


def test_tools_that_are_not_strict_leave_the_answer_free():
    assert OFFERED.grammar([LOOSE], None) is None and OFFERED.grammar([], None) is None
    assert SINGLE.grammar([], None) is None
    assert OFFERED.grammar([], {"regex": "a"}).kind == "regex"


def test_what_cannot_be_enforced_counts_only_where_it_must_be():
    odd = {"name": "odd", "parameters": {"type": "object", "not": {}}}
    assert SINGLE.grammar([odd], None) is not None
    with pytest.raises(ValueError, match="not"):
        OFFERED.grammar([odd | {"strict": True}], None)


@pytest.mark.parametrize(
    ("protocol", "body", "choice"),
    [
        ("chat", {}, OFFERED),
        ("chat", {"tool_choice": "auto", "parallel_tool_calls": False}, SINGLE),
        ("chat", {"tool_choice": "required"}, DEMANDED),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "weather"}}}, NAMED),
        ("responses", {"tool_choice": {"type": "function", "name": "weather"}}, NAMED),
        ("responses", {"tool_choice": "required", "parallel_tool_calls": True}, DEMANDED),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, SINGLE),
        ("messages", {"tool_choice": {"type": "any"}}, DEMANDED),
        ("messages", {"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}, NAMED),
        ("messages", {"tools": [{"name": "f", "strict": True}, {"name": "g"}, 7]}, ToolChoice(strict=frozenset("f"))),
    ],
)
def test_each_protocol_says_it_in_its_own_words(protocol, body, choice):
    plain, found = split_tool_choice(body, protocol)
    assert found == choice
    if choice.is_demanded:
        assert plain["tool_choice"] == ({"type": "auto"} if protocol == "messages" else "auto")
    else:
        assert plain == body
