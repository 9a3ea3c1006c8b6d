"""Steps of nothing: rows of the padding slot, which reads zeros and writes nothing."""

from __future__ import annotations

import numpy as np

from deepinfer.messages import Int32, StepPlan


def spread(num_tokens: int, num_rows: int) -> Int32:
    """Tokens of each row [rows], as even as can be, the larger ones first."""
    return num_tokens // num_rows + (np.arange(num_rows) < num_tokens % num_rows).astype(np.int32)


def padding_plan(starts: Int32, counts: Int32, *, is_prefill: bool) -> StepPlan:
    """Rows of these tokens [rows], of prompts or newest ones with drafts; each draws."""
    zeros, nothing = np.zeros_like(starts), np.zeros(0, dtype=np.int32)
    yes, no = np.ones(len(starts), dtype=np.bool_), np.zeros(len(starts), dtype=np.bool_)
    tokens = np.zeros(int(counts.sum()), dtype=np.int32) if is_prefill else nothing
    return StepPlan(
        0, zeros, starts, counts, zeros, yes & is_prefill, yes, no, tokens, nothing, nothing, nothing
    )  # fmt: skip
