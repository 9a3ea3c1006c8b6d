"""A guard against work per request or per block creeping into a decode step; `benchmarks/scheduler` measures."""

import statistics
import time

import pytest

from deepinfer.backends.null.runner import NullModel
from null_engine import NullEngine

STEPS = 30


@pytest.mark.parametrize(("num_rows", "bound_ms"), [(256, 1.5), (512, 5.0)])
def test_a_decode_step_stays_within_five_times_its_target(num_rows, bound_ms):
    engine = NullEngine(
        num_blocks=num_rows * 3,
        num_slots=num_rows,
        block_tokens=128,
        max_model_len=131072,
        max_step_tokens=num_rows * 256,
        max_queue=num_rows,
        model=NullModel(vocab_size=129280),
    )
    scheduler, runner = engine.scheduler, engine.runner
    scheduler.check = lambda: None  # adding `num_rows` requests would check each time
    for row in range(num_rows):
        engine.add(f"r{row}", 100 + row % 128, max_tokens=2 * STEPS, ignore_eos=True, stop_token_ids=(1, 2))
    plan, milliseconds = scheduler.schedule(), []
    for _ in range(STEPS):
        result = runner.execute(plan)
        start = time.perf_counter()
        output = scheduler.update(result)
        plan = scheduler.schedule()
        milliseconds.append((time.perf_counter() - start) * 1e3)
        assert len(output.request_ids) == plan.num_rows == num_rows
    assert statistics.median(milliseconds) < bound_ms
