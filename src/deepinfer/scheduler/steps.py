"""What a scheduler keeps of its plans until their results come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer.messages import Bool, Int32, Int64
from deepinfer.scheduler.request import Request


@dataclass(slots=True)
class Chunk:
    """A prefill row: positions start .. end - 1."""

    request: Request
    slot: int
    start: int
    end: int
    samples: bool
    wants_logits: bool

    @property
    def num_logprobs(self) -> int:
        """Tokens of the row, from its first on, that a prompt token follows which is to be scored."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, len(self.request.prompt) - 1) - self.start)


@dataclass(slots=True)
class InFlight:
    """What `update` needs to know of a plan: its sampling rows, and those that return logits or log-probabilities."""

    step: int
    slots: Int32
    serials: Int64
    counts: Int32  # tokens that each row can give at most
    is_single: bool  # it computes newest tokens only, no draft and no prompt
    logit_rows: list[tuple[int, Chunk]] = field(default_factory=list)
    logprob_chunks: list[Chunk] = field(default_factory=list)


def comes_after(is_end: Bool, num_lines: Int32) -> Bool:
    """Which lines come after an end in the same row; row after row has num_lines of them."""
    before = np.concatenate(([0], np.cumsum(is_end)))
    at_start = before[np.cumsum(num_lines) - num_lines]
    after: Bool = before[:-1] > np.repeat(at_start, num_lines)
    return after
