"""Runs a job (see `job.py`) with mlx-lm: JOB, and `packed` or `float32` for how the weights are kept.

One request goes through `generate_step`. `batch_generate` refuses this model (its cache cannot be merged), so a
batch calls the model itself with prompts of equal length, which the model allows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from job import Answer, Job, measure

job = Job(**json.loads(sys.argv[1]))
os.environ["OPENBLAS_NUM_THREADS"] = str(job.num_threads)  # read when the library loads

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.utils import dequantize_model  # noqa: E402


def answer_one(model: Any, prompt: list[int], num_tokens: int) -> list[Answer]:
    start = time.perf_counter()
    tokens, times = [], []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens):
        tokens.append(int(token))
        times.append(time.perf_counter() - start)
    return [Answer(times[0], times[-1], tokens)]


def answer_batch(model: Any, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    start = time.perf_counter()
    cache, inputs = model.make_cache(), mx.array(prompts)
    columns, times = [], []
    for _ in range(num_tokens):
        tokens = mx.argmax(model(inputs, cache)[:, -1], axis=-1)
        columns.append(tokens.tolist())
        times.append(time.perf_counter() - start)
        inputs = tokens[:, None]
    return [Answer(times[0], times[-1], list(ids)) for ids in zip(*columns, strict=True)]


def main() -> None:
    model, _ = load(job.folder)
    if sys.argv[2] == "float32":
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())

    def answer(prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        if len(prompts) == 1:
            return answer_one(model, prompts[0], num_tokens)
        return answer_batch(model, prompts, num_tokens)

    measure(job, answer)


if __name__ == "__main__":
    main()
