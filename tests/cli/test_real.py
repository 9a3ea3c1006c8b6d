"""The commands on the small model that ships with the package."""

import base64
import json

import pytest

from deepinfer.cli.eval import NANO_EVAL
from deepinfer.cli.main import main


def picture_record(name):
    """The image and the question of a record, and its answer."""
    line = next(line for line in NANO_EVAL.read_text(encoding="utf-8").splitlines() if f'"{name}"' in line)
    record = json.loads(line)
    image, question = record["request"]["messages"][0]["content"]
    return base64.b64decode(image["image_url"]["url"].partition(",")[2]), question["text"], record["answer"]


@pytest.mark.parametrize("name", ["image_digit-1", "image_count-2", "image_two_shapes-1"])
def test_chat_sees_an_attached_image(tmp_path, capsys, name):
    image, question, answer = picture_record(name)
    (tmp_path / "picture.png").write_bytes(image)
    assert main(["chat", "--image", str(tmp_path / "picture.png"), "--temperature", "0", question]) == 0
    assert capsys.readouterr().out == f"{answer}\n"


def test_chat_names_an_image_that_is_damaged(tmp_path, capsys):
    (tmp_path / "picture.png").write_bytes(picture_record("image_digit-0")[0][:500])
    assert main(["chat", "--image", str(tmp_path / "picture.png"), "What?"]) != 0
    assert "image 1 (messages[0].content[1]) is damaged or cut off" in capsys.readouterr().err


def test_chat_answers_a_fact_and_reports_speed(capsys):
    assert main(["chat", "What is the capital of Armenia?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Yerevan\n"
    assert captured.err.startswith("5 tokens, first after ") and captured.err.endswith(" tokens/s\n")


def test_generate_answers_json_lines_and_keeps_bad_ones_apart(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "365 + 534 = ?"}], "thinking": True},
        {"prompt_token_ids": [99999]},
        {"prompt": "<｜begin▁of▁sentence｜><｜User｜>What is 4 + 13?<｜Assistant｜></think>"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", "--file", str(file), "--json", "--max-num-requests", "2"]) == 1
    first, bad, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["reasoning"], first["content"]) == ("5+4=9, 6+3=9, 3+5=8. So 899.", "899")
    assert "99999" in bad["error"] and bad["finish_reason"] == "error"
    assert (last["text"], last["finish_reason"], last["error"]) == ("17", "stop", None)


def test_eval_of_easy_skills_agrees_with_the_card(capsys):
    skills = "copy_text,spell,multiplication,image_digit"
    assert main(["eval", "--skills", skills, "--limit", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["exact"], report["card"]) == (8, 1.0, 1.0)
    assert 0 < report["loss"] < 0.05
