"""An engine core over a null runner that a test can hold and spoil."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from deepinfer.backends.null.runner import NullModel, NullRunner
from deepinfer.cache.manager import CacheManager
from deepinfer.config.engine import SchedulerOptions
from deepinfer.engine.core import EngineCore
from deepinfer.messages import GenerateRequest, StepPlan, StepResult
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.scheduler import Scheduler
from waiting import PATIENCE

MODEL = NullModel(vocab_size=50)
NUM_BLOCKS, BLOCK_TOKENS, MAX_LEN = 20, 4, 64


class FakeExecutor:
    """Runs plans on a null runner; waits for `gate` before each and fails at step `fails_at`."""

    def __init__(self, num_slots: int):
        self.runner = NullRunner(
            MODEL, num_slots=num_slots, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, max_model_len=MAX_LEN
        )
        self.gate, self.fails_at = threading.Event(), -1
        self.gate.set()
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(PATIENCE)
        self.plans.append(plan)
        if plan.step == self.fails_at:
            raise RuntimeError("the device burns")
        return self.runner.execute(plan)


def make_core(*, is_async: bool = True, num_slots: int = 2) -> tuple[EngineCore, FakeExecutor]:
    cache = CacheManager(NUM_BLOCKS, num_slots, BLOCK_TOKENS, MAX_LEN)
    options = SchedulerOptions(num_slots, 16, max_queue=8)
    scheduler = Scheduler(options, cache, eos_token_ids=(), max_model_len=MAX_LEN, vocab_size=50)
    executor = FakeExecutor(num_slots)
    return EngineCore(scheduler, cache, executor, is_async=is_async), executor


def request(name: str, num_tokens: int = 5, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=num_tokens, seed=1)
    return GenerateRequest(name, np.array([3, 4], np.int32), params, 0.0, **fields)


def expected(num_tokens: int = 5) -> list[int]:
    """The answer to such a request."""
    return MODEL.answer(np.array([3, 4], np.int32), 1, num_tokens)
