"""`deepinfer bench rank`: what it prints of its cases, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.cli.bench_rank import line, op_table, plot
from deepinfer.cli.main import main


def case(num_requests: int, rate: float) -> Any:
    return SimpleNamespace(
        kind="decode", num_requests=num_requests, num_tokens=4 * num_requests, step_ms=20.0, step_low_ms=19.0,
        step_high_ms=22.0, forward_ms=18.0, host_ms=0.5, tokens_per_s=rate, tokens_per_s_user=rate / num_requests,
        ops={"attend": 10.0, "experts": 8.0}, floors={"attend": 1.0, "experts": 4.0},
    )  # fmt: skip


def test_a_case_is_one_line_and_ops_stand_beside_their_floors():
    assert line(case(8, 1040.0)) == (
        "decode of 8 requests, 32 tokens: 20.0 ms (19.0-22.0), forward 18.0 (floor 5.0), host 0.50; "
        "1,040 tokens/s, 130.0 a user"
    )
    rows = op_table([case(8, 1040.0)]).splitlines()
    assert [row.split() for row in rows[2:]] == [
        ["attend", "10.00", "(10", "%)"], ["experts", "8.00", "(50", "%)"], ["sum", "18.0"],
    ]  # fmt: skip


def test_the_plot_has_a_point_for_each_batch():
    drawn = plot([case(8, 1040.0), case(256, 5900.0)])
    assert drawn.count("<circle") == 2 and ">8</text>" in drawn and ">256</text>" in drawn


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["bench", "rank", "--model", "tests/config-flash.json", *flags]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "give multiples of --length, which is 4096" in refused(capsys, "--prefill", "5000")
    assert "--requests: '0' is not a whole number from 1 on" in refused(capsys, "--requests", "8,0")
    assert "--requests: '' is not a whole number" in refused(capsys, "--requests", "")
    for flag in ("--ranks", "--repeat", "--length", "--context", "--drafts"):
        assert f"{flag}: '0' is not a whole number from 1 on" in refused(capsys, flag, "0")
    assert "--acceptance: '1.5' is not a number from 0 to 1" in refused(capsys, "--acceptance", "1.5")
    assert "--acceptance: 'nan' is not" in refused(capsys, "--acceptance", "nan")
