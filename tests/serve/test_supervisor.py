"""When an engine counts as stuck; `test_crash` has what follows from that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.wire import Start
from deepinfer.serve import supervisor
from deepinfer.serve.supervisor import NUM_LOOKS, Supervisor


class Over(Exception):
    """All looks were taken."""


def watch(monkeypatch: pytest.MonkeyPatch, told: Iterable[bool]) -> int:
    """How often the engine is killed, if it told something or not before each of the looks at it."""
    killed: list[bool] = []
    link = SimpleNamespace(is_up=True, detach=lambda cause: None)
    start = Start(EngineConfig.from_options({}), Path(), None)
    one = Supervisor(start, link, 10.0)
    one._process = SimpleNamespace(kill=lambda: killed.append(True))
    looks = iter(told)

    async def sleep(seconds: float) -> None:
        assert seconds == 10.0 / NUM_LOOKS
        has_told = next(looks, None)
        if has_told is None:
            raise Over
        one._has_told |= has_told

    # In that module alone: servers of other tests sleep too.
    monkeypatch.setattr(supervisor, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    with pytest.raises(Over):
        asyncio.run(one._watch())
    return len(killed)


@pytest.mark.parametrize(
    ("told", "num_kills"),
    [([True] * 20, 0), ([False] * 5, 0), ([False] * 6, 1), (([False] * 4 + [True]) * 4, 0), ([True] + [False] * 5, 1)],
)  # as it starts, the engine has told that it is ready
def test_an_engine_is_killed_that_told_nothing_before_five_looks_in_a_row(
    monkeypatch: pytest.MonkeyPatch, told: list[bool], num_kills: int
) -> None:
    assert watch(monkeypatch, told) == num_kills
