"""What an engine has done so far: counters that log lines, metrics and benchmarks read."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.messages import DraftCounts, OpCheck


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    num_tokens: tokens that passed the model, prompts and answers, recomputed ones included.
    num_generated_tokens: tokens that requests received.
    num_not_finite: requests that ended because the model's logits were NaN or infinite.
    num_encoded_images: images that passed the image encoder; one of known content does not.
    encode_seconds: time in which it worked, beside the steps.
    device_seconds: time in which the device side worked on steps.
    op_seconds: the part of it in each kind of op; empty unless `time_ops` is set.
    drafts: what became of drafted tokens; None without drafting.
    op_checks: whether each op is batch-invariant, as far as steps have shown; empty unless `check_ops` is set.
    block_tokens: tokens of one request that a cache block is for.
    """

    num_steps: int
    num_tokens: int
    num_generated_tokens: int
    device_seconds: float
    op_seconds: dict[str, float]
    op_checks: dict[str, OpCheck]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_not_finite: int
    num_encoded_images: int
    encode_seconds: float
    block_tokens: int
    num_blocks: int
    num_free_blocks: int
    drafts: DraftCounts | None = None
