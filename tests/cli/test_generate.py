import dataclasses
import io
import json
import math

import pytest

from cli.fake_llm import output
from deepinfer.cli.main import main
from deepinfer.frontend.outputs import RequestOutput, TokenLogprobs


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_one_argument_prints_its_answer_alone(llm, capsys):
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_several_prompts_are_numbered_and_one_failure_is_code_1(llm, capsys):
    assert main(["generate", "a", "please refuse", "c"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "[1] A\n[3] C\n"
    assert captured.err == "deepinfer: prompt 2: the prompt is refused\n"


def test_plain_lines_of_standard_input_are_prompts(llm, type_in, capsys):
    type_in("a\n\nb\n")
    assert main(["generate", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "[1] A\n[2] B\n"
    assert [params.max_tokens for params in llm.calls[0][2]] == [5, 5]


def test_chat_flag_sends_prompts_as_user_messages(llm, capsys):
    assert main(["generate", "--chat", "--thinking", "hi"]) == 0
    assert capsys.readouterr().out == "HI\n"
    assert llm.calls == [("chat", [[{"role": "user", "content": "hi"}]], llm.calls[0][2], {"thinking": True})]


def test_json_lines_keep_their_order_and_bad_ones_fail_alone(llm, type_in, capsys):
    lines = [
        '{"prompt": "a", "id": "first", "temperature": 0.5, "seq_seed": 7}',
        "not json",
        '{"messages": [{"role": "user", "content": "b"}], "thinking": true}',
        '{"prompt": "c", "max_tokens": -1}',
        '{"prompt_token_ids": [5, 6], "max_tokens": 2}',
        '{"prompt": "d", "messages": []}',
        '{"prompt": "e", "tools": []}',
        '{"prompt": "f", "temprature": 1}',
        '{"messages": [{"role": "user", "content": "g"}], "effort": "bad"}',
        "[1]",
        '{"prompt": "refuse"}',
        '{"messages": {"role": "user", "content": "h"}}',
        '{"prompt": ' + 100_000 * "[",
    ]
    type_in("\n".join(lines) + "\n\n")
    assert main(["generate", "--json", "--seed", "3"]) == 1
    out = records(capsys.readouterr().out)
    assert [record["index"] for record in out] == list(range(13))
    assert [record.get("text") for record in out if record["error"] is None] == ["A", "B", ""]
    assert out[0]["id"] == "first" and "id" not in out[2]
    errors = {record["index"]: record["error"] for record in out if record["error"]}
    for index, words in {
        1: "line is not JSON",
        3: "max_tokens is -1; it must be at least 1",
        5: "line has prompt and messages; give one of",
        6: "tools can only be given with messages",
        7: "unknown sampling parameter 'temprature'",
        8: "effort is 'bad'",
        9: "it must be a JSON object",
        10: "the prompt is refused",
        11: "it must be a list of messages",
        12: "line is not JSON: maximum recursion depth",
    }.items():
        assert words in errors.pop(index)
    assert errors == {}
    prompts, params = llm.calls[0][1:3]
    assert prompts == [{"prompt": "a"}, {"prompt_token_ids": [5, 6]}, {"prompt": "refuse"}]
    assert (params[0].temperature, params[0].seed, params[1].seed) == (0.5, 7, 3)


def test_json_lines_bring_the_images_of_their_prompts(llm, type_in, capsys):
    lines = [
        '{"prompt": "a <｜image｜>", "images": ["a.png"]}',
        '{"prompt_token_ids": [5], "images": [], "max_tokens": 2}',
        '{"prompt": "b"}',
    ]
    type_in("\n".join(lines))
    assert main(["generate", "--json"]) == 0
    prompts = llm.calls[0][1]
    assert prompts[0] == {"prompt": "a <｜image｜>", "images": ["a.png"]}
    assert prompts[1:] == [{"prompt_token_ids": [5], "images": []}, {"prompt": "b"}]


def test_json_lines_end_at_line_breaks_only_and_give_ids_back_whatever_they_hold(llm, type_in, capsys):
    type_in('{"prompt": "a\u2028b\x85", "id": "\\ud800\u0436"}\n')
    assert main(["generate", "--json"]) == 0
    printed = capsys.readouterr().out
    (record,) = [json.loads(line) for line in printed.rstrip("\n").split("\n")]
    assert (record["id"], record["text"]) == ("\ud800\u0436", "A\u2028B\x85") and printed.encode()


def test_json_lines_have_null_for_the_logprob_of_an_excluded_token(llm, type_in, capsys):
    scored = output(RequestOutput, logprobs=[TokenLogprobs(5, -math.inf, 7, [(7, 0.0)])])
    llm.generate = lambda prompts, params, progress=None: [scored]
    type_in('{"prompt": "a"}\n')
    assert main(["generate", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=pytest.fail)["logprobs"][0]["logprob"] is None


def test_file_named_jsonl_is_read_as_json_lines(llm, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert main(["generate", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "A\n"


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["--file", "missing.txt"], "", "cannot read missing.txt"),
        (["a", "--file", "x"], "", "give them in one way"),
        ([], "\n \n", "holds no prompt"),
    ],
)
def test_input_that_cannot_be_used_is_refused(llm, type_in, capsys, words, text, message):
    type_in(text)
    assert main(["generate", *words]) == 2
    assert message in capsys.readouterr().err


def test_standard_input_that_is_no_text_is_refused(llm, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["generate"]) == 2
    assert "cannot read standard input: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_every_answer_of_a_prompt_is_printed(llm, capsys):
    answers = [output(RequestOutput, text=text, prompt_token_ids=[1]) for text in ("one", "two")]
    llm.generate = lambda prompts, params, progress=None: [dataclasses.replace(answers[0], more=answers[1:])]
    assert main(["generate", "hello", "--n", "2", "--temperature", "1"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_json_lines_hold_every_answer_and_the_first_error_among_them(llm, type_in, capsys):
    good, bad = (output(RequestOutput, text=text, prompt_token_ids=[1], error=text or None) for text in ("", "broken"))
    llm.generate = lambda prompts, params, progress=None: [dataclasses.replace(good, more=[good, bad])]
    type_in('{"prompt": "a", "n": 3, "temperature": 1}\n')
    assert main(["generate", "--json"]) == 1
    (record,) = records(capsys.readouterr().out)
    assert record["error"] == "broken" and [answer["text"] for answer in record["more"]] == ["", "broken"]
    assert not any("prompt_token_ids" in answer for answer in (record, *record["more"]))


def test_sampling_flags_of_every_form_reach_the_parameters(llm):
    flags = ["--logit-bias", "3:1.5,7:-100", "--bad-words", "x", "--bad-words", "y", "--allowed-token-ids", "3,7"]
    flags += ["--golden-token-ids", "7,7", "--logprobs-mode", "processed", "--include-stop-str-in-output"]
    assert main(["generate", "a", *flags]) == 0
    (params,) = llm.calls[0][2]
    assert params.logit_bias == ((3, 1.5), (7, -100.0)) and params.bad_words == ("x", "y")
    assert (params.allowed_token_ids, params.golden_token_ids) == ((3, 7), (7, 7))
    assert params.logprobs_mode == "processed" and params.include_stop_str_in_output


def test_a_json_line_overrides_a_flag_under_its_other_name(llm, type_in):
    type_in('{"prompt": "a", "top_logprobs": 4, "logprobs": true}\n{"prompt": "a", "top_logprobs": 2}\n')
    assert main(["generate", "--json", "--logprobs", "1"]) == 0
    assert [params.logprobs for params in llm.calls[0][2]] == [4, 2]
