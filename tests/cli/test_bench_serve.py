"""What the plot of `deepinfer bench serve` shows; the command itself is tested with a server in tests/load."""

from __future__ import annotations

import pytest

from deepinfer.cli.bench_serve import draw
from deepinfer.load.client import Outcome


def outcomes() -> list[Outcome]:
    """First tokens after 10, 20, 30 and 40 ms, then two gaps of 5 and 15 ms; one failure."""
    answered = [
        Outcome(due=n, arrivals=[n + first, n + first + 0.005, n + first + 0.02], done=n + 1.0, num_tokens=3)
        for n, first in enumerate((0.01, 0.02, 0.03, 0.04))
    ]
    return [*answered, Outcome(due=0.0, done=0.5, error="status 500: no")]


def test_each_panel_has_its_distribution_and_percentiles():
    figure = draw(outcomes())
    assert figure.get_suptitle() == "Latencies of 4 requests"
    expected = (
        ("time to first token, ms", "requests within it, %", (10, 40), ["4 requests", "p50: 25.0 ms", "p99: 39.7 ms"]),
        ("time between tokens, ms", "gaps within it, %", (5, 15), ["8 gaps", "p50: 10.0 ms", "p99: 15.0 ms"]),
        ("time to the end, ms", "requests within it, %", (30, 60), ["4 requests", "p50: 45.0 ms", "p99: 59.7 ms"]),
    )
    for panel, (x, y, ends, labels) in zip(figure.axes, expected, strict=True):
        assert (panel.get_xlabel(), panel.get_ylabel()) == (x, y)
        assert [text.get_text() for text in panel.get_legend().get_texts()] == labels
        curve, *marks = panel.get_lines()
        assert curve.get_xdata()[[0, -1]] == pytest.approx(ends) and [*curve.get_ydata()[[0, -1]]] == [0, 100]
        told = [float(label.split()[1]) for label in labels[1:]]
        assert [mark.get_xdata()[0] for mark in marks] == pytest.approx(told, abs=0.051)


def test_no_answers_give_empty_panels():
    figure = draw([Outcome(due=0.0, done=0.5, error="status 500: no")])
    assert figure.get_suptitle() == "Latencies of 0 requests"
    assert [len(panel.get_lines()) for panel in figure.axes] == [0, 0, 0]
