"""Time of each op in a decode step of a model, as the model calls it: a table in microseconds.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/ops/decode.py [--model FOLDER] [--precision fast]
        [--backend cpu] [--threads 1] [--rows 1,64] [--context 200] [--steps 30] [--json]

Every op of the table is wrapped in a clock and whole decode steps of the model run over caches that
hold `context` tokens per request. Before timing, one step is compared with the same rows run one
at a time. On the line "step" stands the whole forward pass without the clocks, and with layers as one
call where the backend has that.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.cache.pools import CachePools
from deepinfer.checkpoint.hub import resolve
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.model import BoundModel, Model
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import ForwardBatch, TokenBatch
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import OP_NAMES, Ops, build, one_by_one


class Clock:
    """Seconds of every call of every op while it is on."""

    def __init__(self, device: torch.device) -> None:
        self.is_on, self.device = False, device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if not self.is_on:
                return function(*arguments)
            self.wait()
            start = time.perf_counter()
            result = function(*arguments)
            self.wait()
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def all_ops(precision: str, backend: str) -> Ops:
    """The table of a backend."""
    return build({"reference": reference_ops(precision)} | ({"cpu": cpu_ops()} if backend == "cpu" else {}))


def timed_ops(precision: str, backend: str, clock: Clock) -> Ops:
    """The table of a backend, each op behind the clock, layers composed of them."""
    ops = one_by_one(all_ops(precision, backend))
    for name in OP_NAMES:
        setattr(ops, name, clock.wrap(name, getattr(ops, name)))
    return ops


def decode_batch(config: ModelConfig, tokens: Tensor, start: int, first_row: int = 0) -> ForwardBatch:
    """tokens [rows, count]: each row continues its request, of slot and block run first_row + row + 1, at `start`."""
    device, (rows, count) = tokens.device, tokens.shape
    row = torch.arange(rows, dtype=torch.int32, device=device)
    columns = blocks_per_request(config, start + count)
    batch = TokenBatch(
        positions=(start + torch.arange(count, dtype=torch.int32, device=device)).repeat(rows),
        rows=row.repeat_interleave(count),
        row_offsets=torch.arange(rows + 1, dtype=torch.int32, device=device) * count,
        row_starts=torch.full_like(row, start),
        row_slots=row + first_row + 1,
        block_table=(row + first_row).unsqueeze(1) * columns + torch.arange(1, columns + 1, device=device).int(),
        window_starts=torch.zeros_like(row),
        block_tokens=config.block_tokens,
        max_position=start + count - 1,
    )
    last = torch.arange(1, rows + 1, device=device) * count - 1
    return ForwardBatch(tokens.flatten(), None, batch, batch, None, last)


def blocks_per_request(config: ModelConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.block_tokens)


def filled_caches(model: Model, rows: int, context: int, device: torch.device) -> tuple[BoundModel, Tensor]:
    """Caches after a prompt of `context` random tokens per request, and the next token of each."""
    config = model.config
    num_blocks = rows * blocks_per_request(config, context + 1)
    bound = model.bind(CachePools(cache_layout(config), num_blocks, rows, device))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size - 1, (rows, context + 1), generator=random).to(device)
    for row in range(rows):
        prompt = decode_batch(config, tokens[row : row + 1, :context], 0, row)
        columns = blocks_per_request(config, context + 1)
        prompt.encoder.block_table[:] = row * columns + torch.arange(1, prompt.encoder.block_table.shape[1] + 1)
        bound.compute(prompt, 1)
    return bound, tokens[:, context:]


def logits(bound: BoundModel, inputs: ForwardBatch) -> Tensor:
    return bound.compute(inputs, len(inputs.logit_tokens)).logits


def measure(
    model: Model, timed: Model, clock: Clock, shape: tuple[int, int], steps: int, limit: float
) -> dict[str, Any]:
    """Microseconds by op: calls a step; median, 90th percentile and best of a call; mean sum a step."""
    rows, context = shape
    bound, tokens = filled_caches(model, rows, context, clock.device)
    by_op, _ = filled_caches(timed, rows, context, clock.device)
    together = logits(bound, decode_batch(model.config, tokens, context))  # the same step again writes the same bytes
    for row in range(0, rows, 13):
        alone = logits(bound, decode_batch(model.config, tokens[row : row + 1], context, row))[0]
        error = float((alone - together[row]).norm() / alone.norm())
        assert error < limit, f"row {row} alone differs by {error:.1e}"
    whole = []
    for _ in range(steps):
        inputs = decode_batch(model.config, tokens, context)
        start = time.perf_counter()
        logits(bound, inputs)
        clock.wait()
        whole.append(time.perf_counter() - start)
    clock.seconds.clear()
    for _ in range(steps):
        inputs = decode_batch(model.config, tokens, context)
        clock.is_on = True
        logits(by_op, inputs)
        clock.is_on = False
    lines = {name: _line(seconds, len(seconds) / steps) for name, seconds in clock.seconds.items()}
    return dict(sorted(lines.items(), key=lambda item: -item[1]["step_us"])) | {"step": _line(whole, 1)}


def _line(seconds: list[float], calls: float) -> dict[str, float]:
    median, high = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    return {
        "calls": round(calls, 2),
        "call_us": round(median * 1e6, 1),
        "call_p90_us": round(high * 1e6, 1),
        "call_best_us": round(min(seconds) * 1e6, 1),
        "step_us": round(statistics.mean(seconds) * calls * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or hub id; the small model by default")
    parser.add_argument("--precision", default="fast", choices=("exact", "float32", "fast"))
    parser.add_argument("--backend", default="reference", choices=("reference", "cpu"))
    parser.add_argument("--threads", type=int, default=1, help="of the cpu backend")
    parser.add_argument("--rows", default="1,64", help="requests in a step, as in 1,64")
    parser.add_argument("--context", type=int, default=200, help="tokens that each request has in the caches")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object a case instead of the tables")
    arguments = parser.parse_args()
    folder, device = resolve(arguments.model), torch.device(arguments.device)
    config, clock = ModelConfig.from_file(folder / "config.json"), Clock(device)
    weights = ModelWeights(Checkpoint(folder), config, folder, device)
    # a last bit may decide an fp4 or fp8 rounding of a cached vector; exact rounds activations as well
    limit = 0.5 if arguments.precision == "exact" else 0.1
    if arguments.backend == "cpu":
        native().set_num_threads(arguments.threads)
    model = Model(config, all_ops(arguments.precision, arguments.backend), weights)
    timed = copy.copy(model)
    timed.ops = timed_ops(arguments.precision, arguments.backend, clock)
    for rows in (int(count) for count in arguments.rows.split(",")):
        lines = measure(model, timed, clock, (rows, arguments.context), arguments.steps, limit)
        case = {
            "rows": rows,
            "context": arguments.context,
            "precision": arguments.precision,
            "backend": arguments.backend,
        } | _machine(device)
        if arguments.json:
            print(json.dumps(case | {"ops": lines}))
            continue
        print(", ".join(f"{name} {value}" for name, value in case.items()))
        print(f"{'op':<18}{'calls':>7}{'us a call':>12}{'p90':>12}{'best':>12}{'us a step':>12}")
        for name, line in lines.items():
            cells = f"{line['call_us']:>12}{line['call_p90_us']:>12}{line['call_best_us']:>12}{line['step_us']:>12}"
            print(f"{name:<18}{line['calls']:>7.4g}{cells}")
        print()


def _machine(device: torch.device) -> dict[str, object]:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    return {"device": where, "torch": torch.__version__, "commit": done.stdout.strip() or "unknown"}


if __name__ == "__main__":
    main()
