"""Nothing of a body gets lost on its way into the prompt: it is there, or the request is refused by its place."""

from pathlib import Path

import pytest

import deepinfer
from deepinfer.errors import RequestError
from deepinfer.frontend.chat import ChatEncoder
from deepinfer.frontend.restated import restated
from deepinfer.frontend.tokenizer import Tokenizer

FOLDER = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"
HI = {"type": "text", "text": "hi"}
QUIET = {"type": "disabled"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "g", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def prompt():
    """The text of a body's prompt."""
    encoder, tokenizer = ChatEncoder(FOLDER / "tokenizer.json"), Tokenizer(FOLDER)

    def make(body, protocol):
        encoded = encoder.encode_body(body, protocol)
        return tokenizer.decode(encoded.token_ids, skip_special_tokens=False)

    return make


def user(*parts, **fields):
    return {"messages": [{"role": "user", "content": [*parts]}], "thinking": QUIET, **fields}


def document(source, **fields):
    return {"type": "document", "source": source, **fields}


def plain(text):
    return {"type": "text", "media_type": "text/plain", "data": text}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (document(plain("Roses.")), "hi\n\nRoses.<"),
        (document(plain("Roses."), title="Garden", context="Of 1920."), "hi\n\nGarden\n\nOf 1920.\n\nRoses.<"),
        (document({"type": "content", "content": "Roses."}), "hi\n\nRoses.<"),
        (document({"type": "content", "content": [HI, document(plain("Roses."))]}), "hi\n\nhi\n\nRoses.<"),
        (document(plain("Roses."), citations={"enabled": False}, title=None), "hi\n\nRoses.<"),
    ],
)
def test_the_text_of_a_document_is_in_the_prompt(prompt, part, expected):
    assert expected in prompt(user(HI, part), "messages")


def test_the_text_of_a_document_in_a_result_is_in_the_prompt(prompt):
    calls = [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [document(plain("Roses."))]}
    turns = [("user", "a"), ("assistant", calls), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert "<tool_result>Roses.</tool_result>" in prompt({"messages": messages, "tools": [TOOL]}, "messages")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (document({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}), "'application/pdf'"),
        (document({"type": "url", "url": "https://a.test/b.pdf"}), "document from 'url'"),
        (document({"type": "file", "file_id": "f"}), "document from 'file'"),
        (document({"type": "text", "data": 3}), "document from 'text'"),
        ({"type": "document"}, "document from None"),
        (document(plain("Roses."), citations={"enabled": True}), "citations are wanted"),
    ],
)
def test_a_document_that_is_not_read_is_refused_by_its_place(prompt, part, words):
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\].*" + words):
        prompt(user(HI, part), "messages")


def test_an_answer_goes_on_with_what_the_assistant_said_last(prompt):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "One, "}]}]
    assert prompt({"messages": messages}, "messages").endswith("<｜Assistant｜></think>One, ")
    told = prompt({"messages": messages, "system": "Be brief.", "tools": [TOOL]}, "messages")
    assert "Be brief." in told and '"name": "f"' in told and told.endswith("One, ")
    with pytest.raises(RequestError, match="turn thinking off"):
        prompt({"messages": messages, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "messages")


@pytest.mark.parametrize("kind", ["custom", None])
def test_a_tool_of_the_client_may_say_so(prompt, kind):
    with_type = prompt(user(HI, tools=[{**TOOL, "type": kind}]), "messages")
    assert with_type == prompt(user(HI, tools=[TOOL]), "messages")


@pytest.mark.parametrize("name", ["function_call", "audio", "refusal"])
def test_a_part_of_a_message_without_a_place_is_refused(prompt, name):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", name: {"id": "x"}}]
    with pytest.raises(RequestError, match=rf"messages\[1\].{name} is set"):
        prompt({"messages": messages}, "chat")
    messages[1][name] = None
    assert prompt({"messages": messages}, "chat")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [FUNCTION, {"type": "web_search"}]}, r"tools\[1\].type is 'web_search'"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, r"tools\[0\].type is 'mcp'"),
        ({"tools": [{"name": "g"}]}, r"tools\[0\].type is None"),
        ({"tools": [{"type": {"a": 1}}]}, r"tools\[0\].type is {'a': 1}"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice is"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, r"input\[0\].type is 'web_search_call'"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, r"input\[0\].type is 'compaction'"),
        ({"input": [{"type": ["message"]}]}, r"input\[0\].type is \['message'\]"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, r"input\[0\] refers to an item"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, r"content\[0\] is a file"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
         r"input\[0\].output\[0\] is a file"),
    ],
)  # fmt: skip
def test_what_an_input_would_lose_is_refused_by_its_place(prompt, fields, words):
    with pytest.raises(RequestError, match=words):
        prompt({"input": "hi"} | fields, "responses")


@pytest.mark.parametrize("value", [None, 3, "a", [3, None], {"a": 1}])
@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_what_has_no_sense_is_left_to_conversion(value, protocol):
    body = dict.fromkeys(("messages", "tools", "input", "tool_choice"), value)
    assert restated(body, protocol) == body
