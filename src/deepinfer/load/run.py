"""Runs a load test: open loop (requests at given times) or closed loop (a fixed number at work)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from deepinfer.load.client import Outcome, Target
from deepinfer.load.plan import Ask


async def run(
    target: Target, asks: Sequence[Ask], *, concurrency: int | None, seconds: float, note: Callable[[], object]
) -> list[Outcome]:
    """Every outcome, in the order of the requests.

    concurrency: most requests at work at once; None = no bound. seconds: for one request.
    note: called at the end of each. A request that has a time is due then, whether or not there is
    room: waiting for room counts as its own latency.
    """
    room = asyncio.Semaphore(concurrency or len(asks))
    started = time.perf_counter()

    async def one(ask: Ask) -> Outcome:
        if ask.at is not None:
            await asyncio.sleep(started + ask.at - time.perf_counter())
        async with room:
            due = time.perf_counter() if ask.at is None else started + ask.at
            outcome = await target.ask(ask, due, seconds)
        note()
        return outcome

    return await asyncio.gather(*map(one, asks))
