"""`deepinfer check determinism` on the golden checkpoint, with fewer and shorter runs than a user gets."""

import json

import pytest

import goldens
from deepinfer import LLM
from deepinfer.backends import select
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.cli import determinism
from deepinfer.cli.main import main

WORDS = ["check", "determinism", "--model", str(goldens.CHECKPOINT), "--device", "cpu"]


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    for name, value in {"BATCH_SIZES": (2, 8), "CHUNKS": (9,), "THREADS": (2,), "NUM_FEW": 6, "NUM_TOKENS": 5}.items():
        monkeypatch.setattr(determinism, name, value)


def test_native_ops_are_equal_in_every_way_and_one_by_one(capsys):
    assert main([*WORDS, "--json", "--max-num-requests", "8", "--kv-cache-bytes", "30000000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_equal"] is True
    ways = [way["name"] for way in report["requests"]]
    assert ways[:4] == [
        "alone again",
        "batches of 2, another order",
        "batches of 8, another order",
        "max_chunk_tokens 9",
    ]
    assert ways[4].startswith("num_blocks 3 (preemptions: ") and not ways[4].endswith(" 0)")
    drafts = ["num_draft_tokens 0", "num_draft_tokens 1", "draft_scheduling False"]
    assert ways[5:] == [*drafts, "async_scheduling False", "num_threads 2"]
    assert [way["num_requests"] for way in report["requests"]] == [6, 8, 8] + [6] * 7
    assert all(way["num_different"] == 0 and way["first_difference"] is None for way in report["requests"])
    assert report["backends"]["cpu"] == {"num_ops": 27, "different": []}
    assert {"attend", "experts", "select", "compress", "head"} <= set(report["ops"])


def test_some_requests_answer_under_a_grammar_drawn_ones_and_greedy_ones(monkeypatch):
    monkeypatch.setattr(determinism, "NUM_FEW", 8)
    with LLM(str(goldens.CHECKPOINT), device="cpu") as llm:
        requests = determinism.make_requests(llm)[: determinism.NUM_FEW]
    constrained = [request.params for request in requests if request.params.constraint is not None]
    assert [params.temperature for params in constrained] == [1.0, 0.0]
    assert all(request.params.ignore_eos != (request.params.constraint is not None) for request in requests)


def test_an_op_that_depends_on_the_batch_is_named_and_gives_code_1(capsys, monkeypatch):
    native = cpu_ops()

    def head(streams, pre, head, out=None):
        return native["head"](streams, pre, head) * (1 + len(streams) * 2.0**-20)

    parts = {name: op for name, op in native.items() if name not in ("prepare_model", "run_model")}
    monkeypatch.setattr(select, "cpu_ops", lambda: {**parts, "head": head})
    assert main([*WORDS, "--num-draft-tokens", "0"]) == 1  # with drafts a request alone has batches of its own
    out = capsys.readouterr().out
    assert "cpu: differs: head\n" in out and "reference on cpu: 1 of 1 ops are equal\n" in out
    (place,) = [number for number, line in enumerate(out.splitlines()) if line.startswith("  head ")]
    verdict, first = out.splitlines()[place : place + 2]
    assert verdict.split()[1] == "differs" and "alone" in first
    assert "requests: differ: batches of 2, another order; batches of 8, another order; " in out
    assert "alone again" not in out.splitlines()[-1]


def test_the_difference_of_a_request_is_told_with_both_values():
    alone = [{"answer token 0": "7", "answer token 1": "8"}, {"answer token 0": "9"}]
    found = [{"answer token 0": "7", "answer token 1": "5"}, {}]
    assert determinism.compare("x", alone, found) == determinism.Comparison(
        "x", 2, 2, "request 0, answer token 1: 8 alone, 5 here"
    )
    assert determinism.compare("x", alone, found[1:]).first_difference == (
        "request 0, answer token 0: 7 alone, not there here"
    )
    assert determinism.compare("x", alone, alone[:1]) == determinism.Comparison("x", 1, 0, None)


def test_a_device_that_computes_nothing_is_refused(capsys):
    assert main([*WORDS[:-1], "null"]) == 2
    assert "device is 'null'" in capsys.readouterr().err


def test_a_model_too_short_for_the_answers_is_refused(capsys):
    assert main([*WORDS, "--max-model-len", "5"]) == 2
    assert "max_model_len is 5; answers of 5 tokens must fit" in capsys.readouterr().err
