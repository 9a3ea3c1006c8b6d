"""`deepinfer bench rank`: what it prints of its cases, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.cli.bench_rank import draw, line, op_table
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


def test_the_plot_has_a_point_for_each_batch_of_decode_steps():
    prefill = case(1, 20000.0)
    prefill.kind = "prefill"
    setting = {"ranks": 64, "context": 131072, "drafts": 3, "acceptance": 0.75, "length": 4096}
    figure = draw([case(8, 1040.0), case(256, 5888.0), prefill], setting)
    (panel,) = figure.axes
    curve, published = panel.get_lines()
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([130.0, 23.0], [1040.0, 5888.0])
    assert (list(published.get_xdata()), list(published.get_ydata())) == ([179.0, 45.3], [1432.0, 256 * 45.3])
    assert [(text.get_text(), text.xy) for text in panel.texts] == [("8", (130.0, 1040.0)), ("256", (23.0, 5888.0))]
    assert figure.get_suptitle() == "Decoding on one rank of 64, context 131,072"
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("tokens/s of a user", "tokens/s of the card")
    names = [text.get_text() for text in panel.get_legend().get_texts()]
    assert names[0].startswith("3 drafts, 75 % accepted") and names[1] == "DeepInfer 0.1.0 on SM100, by floors"
    assert len(draw([case(8, 1040.0)], setting | {"ranks": 8}).axes[0].get_lines()) == 1  # it publishes none there


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
