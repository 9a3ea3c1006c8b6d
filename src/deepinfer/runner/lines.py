"""Lines: the draws of one step, one for each token whose logits give a next token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepinfer.messages import Bool, Int32, StepPlan


@dataclass(frozen=True)
class Lines:
    """The sampling rows of a plan; row r has counts[r] lines, for positions firsts[r], firsts[r] + 1, ...

    A decode row draws after its newest token and after each of its drafts, a prefill row after its last
    token. All arrays [rows]; line_* are [lines], row after row.
    """

    slots: Int32
    firsts: Int32
    counts: Int32
    decoder_starts: Int32

    @classmethod
    def of(cls, plan: StepPlan) -> Lines:
        """Of a plan as it runs."""
        if not plan.is_prefill.any() and plan.samples.all():
            return cls(plan.slots, plan.starts + 1, plan.counts, plan.decoder_starts)
        samples, steps = plan.samples, np.where(plan.is_prefill, plan.counts, 1)
        counts = np.where(plan.is_prefill, 1, plan.counts)
        firsts = plan.starts + steps
        return cls(plan.slots[samples], firsts[samples], counts[samples], plan.decoder_starts[samples])

    @cached_property
    def is_single(self) -> bool:
        """Whether each row has one line."""
        return bool((self.counts == 1).all())

    @cached_property
    def offsets(self) -> Int32:
        """First line of each row."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)

    @property
    def num_lines(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def line_slots(self) -> Int32:
        return self.slots if self.is_single else np.repeat(self.slots, self.counts)

    @cached_property
    def line_places(self) -> Int32:
        """Drafts before each line."""
        return (np.arange(self.num_lines) - np.repeat(self.offsets, self.counts)).astype(np.int32)

    @cached_property
    def line_positions(self) -> Int32:
        return self.firsts if self.is_single else np.repeat(self.firsts, self.counts) + self.line_places

    def kept(self, num_tokens: Int32) -> Bool:
        """Which lines are among the first num_tokens [rows] of their row."""
        kept: Bool = self.line_places < np.repeat(num_tokens, self.counts)
        return kept
