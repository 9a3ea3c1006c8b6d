"""A guard against work per request or per block creeping into a decode step; `benchmarks/scheduler` measures."""

import time

from deepinfer.backends.null.runner import NullModel
from null_engine import NullEngine

STEPS = 30
FEW, MANY = 32, 512


class Decoding:
    """An engine of so many requests, all of which decode."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        engine = NullEngine(
            num_blocks=num_rows * 3,
            num_slots=num_rows,
            block_tokens=128,
            max_model_len=131072,
            max_step_tokens=num_rows * 256,
            max_queue=num_rows,
            model=NullModel(vocab_size=129280),
        )
        self.scheduler, self.runner = engine.scheduler, engine.runner
        self.scheduler.check = lambda: None  # adding `num_rows` requests would check each time
        for row in range(num_rows):
            engine.add(f"r{row}", 100 + row % 128, max_tokens=2 * STEPS, ignore_eos=True, stop_token_ids=(1, 2))
        self.plan = self.scheduler.schedule()

    def step(self):
        """Milliseconds of processor time between two steps of the device."""
        result = self.runner.execute(self.plan)
        start = time.thread_time()
        output = self.scheduler.update(result)
        self.plan = self.scheduler.schedule()
        milliseconds = (time.thread_time() - start) * 1e3
        assert len(output.request_ids) == self.plan.num_rows == self.num_rows
        return milliseconds


def test_a_decode_step_of_many_rows_takes_little_more_time_than_one_of_few():
    few, many = Decoding(FEW), Decoding(MANY)
    times = [(few.step(), many.step()) for _ in range(STEPS)]
    of_few, of_many = (min(column) for column in zip(*times, strict=True))
    # About twice as long; 4 us for each row, which is some lines of Python, would make it six times.
    assert of_many < 6 * of_few
    assert of_many < 10.0  # 0.6 on an idle core
