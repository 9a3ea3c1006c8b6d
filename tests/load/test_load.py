"""Load tests: what is asked, what is measured, and a run against a real server."""

import asyncio
import json
import xml.etree.ElementTree

import numpy as np
import pytest

from deepinfer.cli.main import main
from deepinfer.errors import ConfigError
from deepinfer.load.client import Outcome, Target
from deepinfer.load.plan import Ask, Lengths, random_asks, trace_asks, with_arrivals
from deepinfer.load.report import parse_limits, report, table
from deepinfer.load.run import run
from serve_client import running


def test_lengths_and_arrivals_follow_the_seed():
    asks = random_asks(500, Lengths.parse("5-9"), Lengths.parse("3"), largest_token=99, seed=1)
    assert asks == random_asks(500, Lengths(5, 9), Lengths(3, 3), largest_token=99, seed=1)
    assert {len(ask.prompt) for ask in asks} == {5, 6, 7, 8, 9} and {ask.max_tokens for ask in asks} == {3}
    assert all(16 <= token <= 99 for ask in asks for token in ask.prompt)
    times = [ask.at for ask in with_arrivals(asks, rate=20.0, seed=1)]
    assert times == sorted(times) and times[-1] == pytest.approx(25, rel=0.2)


def test_a_trace_gives_prompts_lengths_and_times(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"input_length": 3, "output_length": 4, "timestamp": 1500}\n')
    first, second = trace_asks(str(file), largest_token=50, seed=0)
    assert first == Ask("a", 2) and (len(second.prompt), second.max_tokens, second.at) == (3, 4, 1.5)
    for bad in ("[1]", '{"prompt": "a"}', "x", ""):
        file.write_text(bad)
        with pytest.raises(ConfigError):
            trace_asks(str(file), largest_token=50, seed=0)


@pytest.mark.parametrize("text", ["", "0", "9-5", "a", "5-", "-5"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(ConfigError):
        Lengths.parse(text)


def test_figures_are_those_of_the_times():
    outcomes = [
        Outcome(due=n, sent=n, arrivals=[n + 0.1, n + 0.2, n + 0.4], done=n + 0.5, num_prompt_tokens=10, num_tokens=3)
        for n in range(4)
    ]
    outcomes.append(Outcome(due=0.0, done=1.0, error="status 500: no"))
    figures = report(outcomes, parse_limits(["ttft:150", "tpot:149"]))
    assert (figures["requests"], figures["completed"], figures["seconds"]) == (5, 4, 3.5)
    assert figures["errors"] == {"status 500: no": 1}
    assert figures["ttft_ms"]["p50"] == 100 and figures["tpot_ms"]["mean"] == 150 and figures["e2e_ms"]["max"] == 400
    assert figures["inter_token_ms"]["p50"] == 150 and figures["output_tokens_per_s"] == pytest.approx(
        12 / 3.5, abs=0.1
    )
    assert figures["goodput"]["requests"] == 0 and report(outcomes, {"tpot": 151.0})["goodput"]["requests"] == 4
    assert "4 of 5 requests" in table(figures) and "1 failed: status 500: no" in table(figures)
    assert report([], {})["completed"] == 0


@pytest.fixture(scope="module")
def null():
    with running({"device": "null", "max_num_requests": 8}, ("key",)) as one:
        yield one


def test_a_closed_loop_counts_what_the_server_sent(null):
    asks = random_asks(20, Lengths(4, 8), Lengths(5, 5), largest_token=4000, seed=0)
    target = Target(null.url + "/v1", key="key")
    outcomes = asyncio.run(run(target, asks, concurrency=3, seconds=60, note=lambda: None))
    assert [outcome.error for outcome in outcomes] == [None] * 20
    assert [outcome.num_prompt_tokens for outcome in outcomes] == [len(ask.prompt) for ask in asks]
    assert {outcome.num_tokens for outcome in outcomes} == {5}
    spans = [(outcome.sent, outcome.done) for outcome in outcomes]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) <= 3


def test_an_open_loop_sends_at_its_times_and_tells_failures(null):
    asks = with_arrivals(random_asks(10, Lengths(4, 4), Lengths(2, 2), largest_token=4000, seed=0), 50.0, 0)
    outcomes = asyncio.run(run(Target(null.url, key="key"), asks, concurrency=None, seconds=60, note=lambda: None))
    due = np.array([outcome.due for outcome in outcomes])
    assert due - due[0] == pytest.approx([ask.at - asks[0].at for ask in asks], abs=1e-6)
    assert all(outcome.sent >= outcome.due for outcome in outcomes)
    (failed,) = asyncio.run(run(Target(null.url), asks[:1], concurrency=None, seconds=60, note=lambda: None))
    assert failed.error.startswith("status 401")


def test_the_command_prints_json_and_draws(null, capsys, tmp_path):
    picture = tmp_path / "plot.svg"
    words = ["bench", "serve", "--url", null.url, "--api-key", "key", "--requests", "6", "--concurrency", "2",
             "--input-length", "4", "--output-length", "3", "--json", "--plot", str(picture)]  # fmt: skip
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    texts = {node.text for node in xml.etree.ElementTree.parse(picture).findall(".//{*}text")}
    assert figures["completed"] == 6 and {"Latencies of 6 requests", "6 requests", "time between tokens, ms"} <= texts
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1", "--concurrency", "1"]) == 1
    assert main(["bench", "serve", "--url", null.url]) == 2
