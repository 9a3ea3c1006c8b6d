"""SlotProgress: how far each slot really is, and plans moved on to there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.messages import Bool, Int32, SlotSetup, StepPlan


class SlotProgress:
    """What the device knows and the planning host does not: how many drafts were accepted so far.

    starts: [num_slots + 1] int32, position of each slot's newest token, once it has sampled.
    """

    def __init__(self, num_slots: int) -> None:
        self.starts = np.zeros(num_slots + 1, dtype=np.int32)
        self._limits = np.zeros(num_slots + 1, dtype=np.int32)

    def set_slot(self, setup: SlotSetup) -> None:
        """The slot has a new occupant."""
        self._limits[setup.slot] = setup.limit

    def room(self, plan: StepPlan) -> Int32:
        """Drafts that each decode row of a plan can check [decode rows]; -1 for one past its request's limit."""
        rows = decode_rows(plan)
        slots = plan.slots[rows]
        room: Int32 = np.minimum(plan.counts[rows], self._limits[slots] - self.starts[slots]) - 1
        return np.maximum(room, -1)

    def goes_on(self, slots: Int32, starts: Int32) -> Bool:
        """Which slots may check a draft in a row from there on, by their request's limit; the padding slot does not."""
        goes_on: Bool = starts + 1 < self._limits[slots]
        return goes_on

    def resolve(self, plan: StepPlan, num_drafts: Int32) -> StepPlan:
        """The plan with the true start of each decode row, and `num_drafts` [decode rows] to check; -1 = no row.

        Such a row becomes one of the padding slot, which reads and writes nothing that counts.
        """
        rows = decode_rows(plan)
        slots, starts, counts, decoder_starts = plan.slots, plan.starts.copy(), plan.counts.copy(), plan.decoder_starts
        starts[rows] = self.starts[slots[rows]]
        counts[rows] = num_drafts + 1
        if num_drafts.min(initial=0) < 0:
            is_real, slots, decoder_starts = num_drafts >= 0, slots.copy(), decoder_starts.copy()
            slots[rows] *= is_real
            starts[rows] *= is_real
            decoder_starts[rows] *= is_real
            counts[rows] += ~is_real
        return plan.moved(slots, starts, counts, decoder_starts)


def decode_rows(plan: StepPlan) -> slice | NDArray[np.int64]:
    """Index of the decode rows; of all rows by a slice, which copies nothing."""
    return np.flatnonzero(~plan.is_prefill) if plan.has_prefill else slice(None)
