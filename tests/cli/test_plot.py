"""Plots of the bench commands: what is refused before anything is measured, and files of each kind."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from deepinfer.cli.main import main
from deepinfer.cli.plot import new_figure, save
from waiting import PATIENCE

SERVE = ("bench", "serve", "--requests", "1", "--concurrency", "1", "--url", "http://127.0.0.1:9")
RANK = ("bench", "rank", "--model", "tests/config-flash.json")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [SERVE, RANK])
def test_a_plot_that_cannot_be_written_is_refused_at_once(command, capsys, tmp_path):
    assert "--plot: 'x.gif' must end in .svg or .png or .pdf" in refusal(capsys, *command, "--plot", "x.gif")
    folder = tmp_path / "none"
    assert f"'{folder}' is no folder; make it first" in refusal(capsys, *command, "--plot", str(folder / "x.svg"))


@pytest.mark.parametrize("command", [SERVE, RANK])
def test_a_plot_without_matplotlib_is_refused_with_the_extra(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    told = refusal(capsys, *command, "--plot", str(tmp_path / "x.svg"))
    assert "plots need the package matplotlib" in told and "install deepinfer with its extra `plot`" in told


def test_without_a_plot_matplotlib_is_not_needed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SERVE]) == 1  # nobody listens there, which is found out by asking
    assert "1 failed" in capsys.readouterr().out


def test_the_commands_do_not_load_matplotlib():
    code = "import sys, deepinfer.cli.main; sys.exit('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "src"}, timeout=PATIENCE)
    assert done.returncode == 0


def test_the_file_is_what_its_name_says(tmp_path: Path):
    figure, panels = new_figure("two panels", 2)
    panels[0].set(xlabel="seconds")
    for name in ("x.svg", "x.png", "x.pdf"):
        save(figure, tmp_path / name)
    texts = [node.text for node in xml.etree.ElementTree.parse(tmp_path / "x.svg").findall(".//{*}text")]
    assert len(panels) == 2 and "two panels" in texts and "seconds" in texts
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "x.pdf").read_bytes()[:5] == b"%PDF-"
