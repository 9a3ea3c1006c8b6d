import json

import pytest

from deepinfer.cli.bench import Spread
from deepinfer.cli.main import main


def test_bench_measures_every_shape_and_prints_json(llm, capsys):
    words = [
        "bench",
        "--batch-sizes",
        "1,2",
        "--prompt-lengths",
        "8",
        "--output-length",
        "4",
        "--repeat",
        "2",
        "--json",
    ]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"] == {"model": "deepinfer-nano", "device": "cpu", "precision": "fast"}
    assert [(case["batch_size"], case["prompt_length"]) for case in result["cases"]] == [(1, 8), (2, 8)]
    # The stand-in takes 0.5 s to the first token and 1.5 s for the other three.
    medians = {name: spread["median"] for name, spread in result["cases"][1].items() if isinstance(spread, dict)}
    assert medians == {
        "prefill_tokens_per_s": 32.0,
        "first_token_ms": 500.0,
        "decode_tokens_per_s": 4.0,
        "step_ms": 500.0,
    }
    assert len(llm.calls) == 2 * 3 + 3  # shapes x (warm-up and repeats), then the runs with timed ops
    prompts = llm.calls[5][1]
    assert [len(prompt) for prompt in prompts] == [8, 8]
    assert all(3 <= token < 128 for prompt in prompts for token in prompt)


def test_bench_tells_the_time_of_each_kind_of_op_and_the_memory(llm, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("deepinfer.cli.bench.open_llm", lambda args, **options: opened.append(options) or llm)
    words = ["bench", "--batch-sizes", "1", "--prompt-lengths", "8", "--output-length", "6", "--repeat", "1"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert opened == [{}, {"time_ops": True}]
    times = result["op_times"]
    assert times["prefill_ms"] == {"attention": 250.0} and times["step_ms"] == {"attention": 0.0}
    assert [call[2].max_tokens for call in llm.calls[-3:]] == [1, 1, 6]
    assert 2**24 < result["peak_memory_bytes"] < 2**40


def test_bench_tells_what_became_of_drafts(llm, capsys):
    words = ["bench", "--batch-sizes", "1", "--prompt-lengths", "8", "--output-length", "4", "--repeat", "1"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == {
        "proposed": [3], "checked": [2], "accepted": [1],
        "num_rows": 2, "mean_accepted": 0.5, "calibration_error": 0.25,
    }  # fmt: skip
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "    1         3         2         1" in text
    assert "accepted a step: 0.50 in 2 rows, calibration error 0.250" in text


def test_bench_refuses_lengths_beyond_the_model_before_it_makes_prompts(llm, capsys):
    assert main(["bench", "--batch-sizes", "1", "--prompt-lengths", "8,999999999", "--output-length", "4"]) == 2
    assert "has 1000000003 tokens but must have at most 1024; lower" in capsys.readouterr().err
    assert llm.calls == []


def test_bench_tables_have_one_line_a_case(llm, capsys):
    assert (
        main(["bench", "--batch-sizes", "3", "--prompt-lengths", "8,16", "--output-length", "4", "--repeat", "1"]) == 0
    )
    out = capsys.readouterr().out
    assert sum(line.split()[:2] in (["3", "8"], ["3", "16"]) for line in out.splitlines()) == 4


def test_bench_refuses_to_time_broken_answers(llm, capsys):
    llm._answer = lambda kind, prompt, params: kind.refused("0", "out of blocks")
    assert main(["bench", "--batch-sizes", "1", "--prompt-lengths", "8"]) == 2
    assert "0 of 32 tokens: out of blocks" in capsys.readouterr().err


def test_bench_refuses_settings_that_measure_nothing(llm, capsys):
    assert main(["bench", "--output-length", "1"]) == 2
    assert "--output-length must be at least 2" in capsys.readouterr().err


def test_spread_is_median_least_and_greatest():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert str(Spread.of([3.0, 1.0, 2.0])) == "2.0 (1.0-3.0)"


@pytest.mark.parametrize("words", [["--repeat", "0"], ["--repeat", "x"]])
def test_bench_refuses_bad_repeats(llm, words, capsys):
    assert main(["bench", *words]) == 2
