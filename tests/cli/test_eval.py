import json
import math

import numpy as np
import pytest

from deepinfer.cli.eval import NANO_EVAL, completion_loss
from deepinfer.cli.main import main

RECORDS = [
    ("add-0", "add", "p", "ab"),
    ("add-1", "add", "q", "cd"),
    ("say-0", "say", "r", "ef"),
    ("image_x-0", "image_x", "s", "g"),
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REQUEST = {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "s"}]}]}


@pytest.fixture
def skills_file(tmp_path):
    file = tmp_path / "eval.jsonl"
    lines = [{"id": i, "skill": s, "prompt": p, "completion": c} for i, s, p, c in RECORDS]
    lines[-1]["request"] = REQUEST
    file.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "report.json").write_text(json.dumps({"summary": {"loss": 0.5}, "misses": ["say-0", "image_x-0"]}))
    return file


@pytest.fixture
def answers(llm):
    """Right for add-0 and say-0, wrong for add-1."""
    llm.completions = {(ord("p"),): (97, 98), (ord("q"),): (1, 2), (ord("r"),): (101, 102), (ord("s"),): (103,)}
    return llm


def run(capsys, file, *words):
    code = main(["eval", "--file", str(file), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_report_counts_exact_matches_per_skill_and_names_the_misses(answers, skills_file, capsys):
    code, report = run(capsys, skills_file)
    assert code == 0
    assert report["skills"]["add"] == {"records": 2, "exact": 0.5, "card": 1.0}
    assert report["skills"]["say"] == {"records": 1, "exact": 1.0, "card": 0.0}
    assert (report["records"], report["exact"], report["card"]) == (4, 0.75, 0.5)
    assert (report["misses"], report["lost"], report["gained"]) == (["add-1"], ["add-1"], ["image_x-0", "say-0"])


def test_records_are_run_with_their_images(answers, skills_file, capsys):
    run(capsys, skills_file, "--skills", "image_x")
    prompts = answers.calls[0][1]
    assert prompts == [{"prompt_token_ids": [ord("s")], "images": [IMAGE["image_url"]["url"]]}]


def test_loss_is_the_mean_over_completion_tokens(answers, skills_file, capsys):
    _, report = run(capsys, skills_file)
    assert report["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert report["card_loss"] == 0.5


def test_skills_and_limit_choose_records(answers, skills_file, capsys):
    _, report = run(capsys, skills_file, "--skills", "add", "--limit", "1", "--no-loss")
    assert (report["records"], report["exact"], report["loss"]) == (1, 1.0, None)


def test_unknown_skill_is_refused(answers, skills_file, capsys):
    assert main(["eval", "--file", str(skills_file), "--skills", "addd"]) == 2
    assert "--skills names addd; the file has add, image_x, say" in capsys.readouterr().err


def test_table_shows_the_card_beside_the_score(answers, skills_file, capsys):
    assert main(["eval", "--file", str(skills_file), "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "add                        1   1.000   1.000" in out
    assert "gained against the card: image_x-0, say-0" in out and "lost" not in out


def test_file_without_a_card_is_scored_alone(answers, skills_file, capsys):
    skills_file.with_name("report.json").unlink()
    _, report = run(capsys, skills_file)
    assert (report["card"], report["card_loss"], report["lost"], report["gained"]) == (None, None, [], [])


def test_completion_loss_matches_hand_figures():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=np.float32)) + 3.0
    assert completion_loss(logits, [1, 2]) == pytest.approx(-math.log(0.25) - math.log(0.8), rel=1e-6)


def test_small_model_ships_with_its_skills_file():
    lines = NANO_EVAL.read_text().splitlines()
    assert len(lines) == 1780
    assert json.loads((NANO_EVAL.parent / "report.json").read_text())["summary"]["records"] == 1780
