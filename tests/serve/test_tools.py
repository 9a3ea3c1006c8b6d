"""Tool calls over several turns, demanded calls, and response formats, through every protocol."""

import json

import jsonschema
import pytest

MODEL = "deepinfer-nano"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS}
TIME = {"name": "get_time", "description": "The time now."}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_call(name, arguments):
    assert name in ("get_weather", "get_time")
    if name == "get_weather":
        jsonschema.validate(json.loads(arguments), PARAMETERS)
    else:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("name", [None, "get_weather", "get_time"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_made_with_thinking_on_or_off(client, thinking, name, stream):
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice, stream=stream, max_tokens=300, temperature=0,
        extra_body={"thinking": {"type": thinking}},
    )  # fmt: skip
    if stream:
        calls, contents, reasons = {}, "", []
        for chunk in answer:
            (one,) = chunk.choices
            contents += one.delta.content or ""
            reasons += [one.finish_reason] if one.finish_reason else []
            for call in one.delta.tool_calls or ():
                old = calls.setdefault(call.index, {"name": "", "arguments": ""})
                old["name"] += call.function.name or ""
                old["arguments"] += call.function.arguments
        found = [(call["name"], call["arguments"]) for call in calls.values()]
        assert contents == "" and reasons == ["tool_calls"]
    else:
        (one,) = answer.choices
        found = [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
        assert one.message.content is None and one.finish_reason == "tool_calls"
    assert found
    for called, arguments in found:
        assert name in (None, called)
        check_call(called, arguments)


def test_no_tool_is_called_when_none_may_be(client):
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=100)
    assert answer.choices[0].message.tool_calls is None


def test_a_conversation_with_calls_goes_on_over_three_turns(client, server):
    messages, prompt = [*ASK], []
    for result in ('{"sky": "clear"}', "18 degrees", "dry"):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=300, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        message = answer.choices[0].message
        assert answer.prompt_token_ids[: len(prompt)] == prompt, "the prompt goes on where the last answer ended"
        prompt = answer.prompt_token_ids + answer.choices[0].token_ids
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call in message.tool_calls]
    last = server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    assert last[: len(prompt)] == prompt


def test_the_other_protocols_demand_calls_too(client, server):
    tools = [{"type": "function", **WEATHER}]
    answer = client.responses.create(model=MODEL, input=ASK[0]["content"], tools=tools, tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    check_call(call.name, call.arguments)
    with server.anthropic() as claude:
        tools = [{"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}]
        messages = [*ASK]
        for _ in range(3):
            answer = claude.messages.create(
                model=MODEL, max_tokens=500, messages=messages, tools=tools, tool_choice={"type": "any"}
            )
            use = next(block for block in answer.content if block.type == "tool_use")
            jsonschema.validate(use.input, PARAMETERS)
            assert answer.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex"])
def test_a_response_format_holds_for_the_content(client, thinking, kind):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    forms = {
        "json_object": {"type": "json_object"},
        "json_schema": {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
        "regex": {"type": "regex", "regex": "[0-9]{2}"},
    }
    ask = [{"role": "user", "content": "What is 12 + 30? Answer in JSON."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=ask, response_format=forms[kind], temperature=0, max_tokens=400,
        extra_body={"thinking": {"type": thinking}},
    )  # fmt: skip
    choice = answer.choices[0]
    content = choice.message.content
    if kind == "json_schema":
        jsonschema.validate(json.loads(content), schema)
    elif kind == "regex":
        assert len(content) == 2 and content.isdigit()
    else:
        assert content.startswith("{") and (choice.finish_reason == "length" or isinstance(json.loads(content), dict))


EXCHANGE = {
    "type": "object",
    "properties": {
        "amount": {"type": "integer", "maximum": 9},
        "source": {"type": "string", "enum": ["Francs", "Crowns"]},
        "target": {"type": "string"},
    },
    "required": ["amount", "source", "target"],
    "additionalProperties": False,
}
CONVERT = {"name": "convert_currency", "description": "Convert an amount"}
MONEY = [{"role": "user", "content": "Convert 905 CHF to EUR."}]


def fits(arguments):
    return jsonschema.Draft202012Validator(EXCHANGE).is_valid(json.loads(arguments))


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_call_of_a_strict_tool_fits_its_parameters_though_none_is_demanded(client, thinking):
    """The model alone would call with 905 and CHF."""

    def calls(ask, **function):
        answer = client.chat.completions.create(
            model=MODEL, messages=ask, tools=[{"type": "function", "function": CONVERT | function}], temperature=0,
            max_tokens=600, extra_body={"thinking": {"type": thinking}},
        )  # fmt: skip
        return answer.choices[0].message

    (free,) = calls(MONEY, parameters=EXCHANGE).tool_calls
    assert not fits(free.function.arguments)
    (strict,) = calls(MONEY, parameters=EXCHANGE, strict=True).tool_calls
    assert strict.function.name == "convert_currency" and fits(strict.function.arguments)
    text = calls([{"role": "user", "content": "What is 12 + 30?"}], parameters=EXCHANGE, strict=True)
    assert text.tool_calls is None and "42" in text.content


def test_the_other_protocols_have_strict_tools_too(client, server):
    tools = [{"type": "function", **CONVERT, "parameters": EXCHANGE, "strict": True}]
    answer = client.responses.create(model=MODEL, input=MONEY[0]["content"], tools=tools, temperature=0)
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert fits(call.arguments)
    with server.anthropic() as claude:
        answer = claude.messages.create(
            model=MODEL, max_tokens=600, messages=MONEY, extra_body={"temperature": 0},
            tools=[{**CONVERT, "input_schema": EXCHANGE, "strict": True}],
        )  # fmt: skip
        use = next(block for block in answer.content if block.type == "tool_use")
        assert fits(json.dumps(use.input))


def test_a_response_format_beside_tools_is_for_the_answers_that_call_none(client):
    kinds = {"item": "string", "quantity": "integer", "price": "integer"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()},
              "required": [*kinds], "additionalProperties": False}  # fmt: skip
    order = "Order 27 of the salt at 451 dollars each.\nGive the fields item, quantity, price as JSON."
    called, told = [
        client.chat.completions.create(
            model=MODEL, messages=ask, tools=[{"type": "function", "function": CONVERT | {"parameters": EXCHANGE}}],
            response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": schema}},
            temperature=0, max_tokens=300, extra_body={"thinking": {"type": "disabled"}},
        ).choices[0].message
        for ask in (MONEY, [{"role": "user", "content": order}])
    ]  # fmt: skip
    assert called.tool_calls and not called.content
    assert told.tool_calls is None and json.loads(told.content) == {"item": "salt", "quantity": 27, "price": 451}
