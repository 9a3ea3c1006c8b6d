import json

import numpy as np
import pytest

from deepinfer.frontend.chat import ChatEncoder
from deepinfer.frontend.chat_stream import ChatStream
from deepinfer.frontend.stops import StopStrings
from deepinfer.messages import Finished, GenerateRequest, RequestTimes
from deepinfer.sampling.params import SamplingParams

TIMES = RequestTimes(0.0, 0.0, 0.0, 1.0)


@pytest.fixture(scope="module")
def encoder(nano) -> ChatEncoder:
    return ChatEncoder(nano / "tokenizer.json")


def answer(encoder, tokenizer, ids: list[int], *, takes: bool, body: dict, **params):
    prompt = encoder.encode_body(body)
    request = GenerateRequest("r", np.array(prompt.token_ids, np.int32), SamplingParams(seed=0, **params), 0.0)
    stream = ChatStream(request, tokenizer, prompt.parser())
    deltas = []
    for token_id in ids:
        stream.add(token_id)
        if takes and (delta := stream.take()):
            deltas.append(delta)
    stream.finish(Finished("r", "stop", TIMES, stop_token=1))
    if takes:
        deltas.append(stream.take())
    return deltas, stream.output()


THINKING = {"messages": [{"role": "user", "content": "hi"}]}


def test_deltas_and_output_agree(encoder, tokenizer):
    ids = tokenizer.encode("Let me see.</think>It is 4.<｜end▁of▁sentence｜>")
    deltas, output = answer(encoder, tokenizer, ids, takes=True, body=THINKING)
    assert (output.reasoning, output.content, output.tool_calls) == ("Let me see.", "It is 4.", [])
    assert output.text == "Let me see.</think>It is 4."
    assert output.token_ids == ids
    assert "".join(delta.answer.reasoning for delta in deltas) == output.reasoning
    assert "".join(delta.answer.content for delta in deltas) == output.content
    assert "".join(delta.text for delta in deltas) == output.text
    assert deltas[-1].finish_reason == "stop"


def test_output_alone_is_the_same(encoder, tokenizer):
    ids = tokenizer.encode("Let me see.</think>It is 4.<｜end▁of▁sentence｜>")
    _, streamed = answer(encoder, tokenizer, ids, takes=True, body=THINKING)
    _, alone = answer(encoder, tokenizer, ids, takes=False, body=THINKING)
    assert alone == streamed
    assert json.loads(json.dumps(alone.as_dict()))["content"] == "It is 4."


def test_what_the_parser_holds_back_comes_with_the_last_delta(encoder, tokenizer):
    deltas, output = answer(encoder, tokenizer, tokenizer.encode("a</thi"), takes=True, body=THINKING)
    assert output.reasoning == "a</thi" == "".join(delta.answer.reasoning for delta in deltas)


def test_a_stop_string_cuts_before_parsing(encoder, tokenizer):
    ids = tokenizer.encode("hm</think>one. two. three.")
    _, output = answer(encoder, tokenizer, ids, takes=True, body=THINKING, stop=[". t"])
    assert (output.reasoning, output.content, output.stop_reason) == ("hm", "one", ". t")


def test_reference_tool_calls_of_the_skills_file_parse(nano, encoder, tokenizer):
    num_calls = 0
    for line in (nano / "eval" / "eval.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["skill"] != "tool_call":
            continue
        _, output = answer(
            encoder, tokenizer, tokenizer.encode(record["completion"]), takes=False, body=record["request"]
        )
        (call,) = output.tool_calls
        assert call.name in {tool["function"]["name"] for tool in record["request"]["tools"]}
        assert isinstance(json.loads(call.arguments), dict)
        assert f'invoke name="{call.name}"' in record["completion"]
        num_calls += 1
    assert num_calls == 40


@pytest.mark.parametrize("takes", [True, False])
def test_stop_strings_of_the_content_leave_thinking_and_markup_alone(encoder, tokenizer, takes):
    prompt = encoder.encode_body(THINKING)
    request = GenerateRequest("r", np.array(prompt.token_ids, np.int32), SamplingParams(seed=0), 0.0)
    stream = ChatStream(request, tokenizer, prompt.parser(StopStrings(["STOP", "zz"])))
    ids, deltas = tokenizer.encode("I must not STOP.</think>ab STOP cd"), []
    while not stream.wants_stop:
        stream.add(ids.pop(0))
        deltas += [stream.take()] if takes else []
    stream.add(ids.pop(0))  # one that was on its way
    stream.finish(Finished("r", "abort", TIMES))
    output = stream.output()
    deltas = [delta for delta in [*deltas, stream.take()] if delta]
    assert (output.reasoning, output.content) == ("I must not STOP.", "ab ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert "".join(delta.answer.content for delta in deltas) == "ab "
    assert tokenizer.decode(output.token_ids).endswith("STOP")


def test_text_held_back_for_a_stop_string_comes_at_the_end(encoder, tokenizer):
    prompt = encoder.encode_body({**THINKING, "thinking": {"type": "disabled"}})
    request = GenerateRequest("r", np.array(prompt.token_ids, np.int32), SamplingParams(seed=0), 0.0)
    stream = ChatStream(request, tokenizer, prompt.parser(StopStrings(["STOP"])))
    for token_id in tokenizer.encode("ab ST"):
        stream.add(token_id)
    stream.finish(Finished("r", "length", TIMES))
    assert stream.output().content == "ab ST" and stream.output().finish_reason == "length"
