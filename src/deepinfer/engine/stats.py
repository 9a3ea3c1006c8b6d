"""What an engine has done so far: counters that log lines, metrics and benchmarks read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    num_tokens: tokens that passed the model, prompts and answers, recomputed ones included.
    num_generated_tokens: tokens that requests received.
    num_not_finite: requests that ended because the model's logits were NaN or infinite.
    device_seconds: time in which the device side worked on steps.
    op_seconds: the part of it in each kind of op; empty unless `time_ops` is set.
    """

    num_steps: int
    num_tokens: int
    num_generated_tokens: int
    device_seconds: float
    op_seconds: dict[str, float]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_not_finite: int
    num_blocks: int
    num_free_blocks: int
