"""Lines: the draws of one step, one for each token whose logits give a next token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepinfer.messages import Bool, Int32, StepPlan


@dataclass
class Lines:
    """The sampling rows of a plan; row r has counts[r] lines, for positions firsts[r], firsts[r] + 1, ...

    A decode row draws after its newest token and after each of its drafts, a prefill row after its last
    token. All arrays [rows]; line_* are [lines], row after row.
    """

    slots: Int32
    firsts: Int32
    counts: Int32
    decoder_starts: Int32
    is_single: bool  # each row has one line

    @classmethod
    def of(cls, plan: StepPlan) -> Lines:
        """Of a plan as it runs."""
        if not plan.has_prefill:
            is_single = plan.is_plain or int(plan.counts.max(initial=1)) == 1
            return cls(plan.slots, plan.starts + 1, plan.counts, plan.decoder_starts, is_single)
        samples, steps = plan.samples, np.where(plan.is_prefill, plan.counts, 1)
        counts = np.where(plan.is_prefill, 1, plan.counts)[samples]
        firsts, is_single = (plan.starts + steps)[samples], bool((counts == 1).all())
        return cls(plan.slots[samples], firsts, counts, plan.decoder_starts[samples], is_single)

    @cached_property
    def offsets(self) -> Int32:
        """First line of each row."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)

    @property
    def num_lines(self) -> int:
        return len(self.slots) if self.is_single else int(self.counts.sum())

    @property
    def line_slots(self) -> Int32:
        return self.slots if self.is_single else np.repeat(self.slots, self.counts)

    @cached_property
    def line_places(self) -> Int32:
        """Drafts before each line."""
        return (np.arange(self.num_lines) - np.repeat(self.offsets, self.counts)).astype(np.int32)

    @property
    def line_positions(self) -> Int32:
        return self.firsts if self.is_single else np.repeat(self.firsts, self.counts) + self.line_places

    def kept(self, num_tokens: Int32) -> Bool:
        """Which lines are among the first num_tokens [rows] of their row."""
        kept: Bool = self.line_places < np.repeat(num_tokens, self.counts)
        return kept
