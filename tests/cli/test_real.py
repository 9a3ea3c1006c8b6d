"""The commands on the small model that ships with the package."""

import json

from deepinfer.cli.main import main


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
    assert main(["eval", "--skills", "copy_text,spell,multiplication", "--limit", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["exact"], report["card"]) == (6, 1.0, 1.0)
    assert 0 < report["loss"] < 0.05
