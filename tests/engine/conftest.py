"""Engines on the golden checkpoint that several files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import goldens
from deepinfer import LLM
from waiting import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves a stream or ends a process waits for its end here, however busy the machine is."""
    monkeypatch.setattr("deepinfer.call.MAX_LEAVE_SECONDS", PATIENCE)
    monkeypatch.setattr("deepinfer.engine.remote.CLOSE_SECONDS", PATIENCE)


@pytest.fixture(scope="module")
def golden() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, precision="float32", max_num_requests=8, num_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def null() -> Iterator[LLM]:
    """No model behind it: tokens are hashes of seed and prompt."""
    with LLM(goldens.CHECKPOINT, device="null", max_num_requests=4, num_blocks=64) as llm:
        yield llm
