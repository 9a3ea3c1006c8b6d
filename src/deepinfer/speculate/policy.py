"""How many drafts each row checks, and whether it is worth drafting at all."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from deepinfer.messages import Int32
from deepinfer.speculate.calibration import Calibration, Float64, Signs
from deepinfer.speculate.costs import RATE, StepCosts

PROBE_STEPS = 1024  # plain steps after which drafts are tried again, to see whether texts or times have changed
FIRST_PROBE = 64  # the same at first, and twice as many each time: times measured under a load are soon found wrong
TRIED_STEPS = 4  # steps with drafts of one try
LOOK_STEPS = 16  # plain steps after which their time is noted and held against that of drafts
FEED_STEPS = 16  # steps before that from which on the draft head reads along again
DRAFTED_STEPS = 64  # steps with drafts after which one decodes plainly, so that its time stays known
SAMPLE_RATE = 0.5  # share of an error that this one step corrects, and each step of a try
MARGIN = 1.06  # by so much drafts must be expected to be faster; times are known no better
MEAN_RATE = 0.05  # share of one step in the mean survival of drafts


class DraftPolicy(Protocol):
    """Decides on the device's side of a step, where accepted counts and signs are known.

    reads_signs: whether it looks at them, and so has to wait for the drafts; it is given none otherwise.
    """

    @property
    def reads_signs(self) -> bool: ...

    def choose(self, signs: Signs, room: Int32, num_useful: Int32, num_other: int) -> Int32:
        """Drafts to check [rows], at most room [rows]; -1 stays -1.

        signs: of all drafts of these rows. num_useful: drafts [rows] up to one that ends the answer, which
        makes those behind it worthless. num_other: tokens of the step besides these rows'.
        """
        ...

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether to draft for the next step of so many rows; asked once in a step, before its time is known."""
        ...

    @property
    def feeds_head(self) -> bool:
        """Whether steps check drafts or leave the draft head what it reads of them; plain steps are cheaper."""
        ...

    def rest(self, num_rows: int, seconds: float) -> None:
        """A plain step of so many rows took so long."""
        ...

    def observe(self, signs: Signs, num_checked: Int32, num_accepted: Int32) -> None:
        """What became of the drafts of a step's rows."""
        ...

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step without prompt tokens took so long, drafting apart."""
        ...

    def observe_drafting(self, num_rows: int, seconds: float) -> None:
        """Drafting for so many rows took so long."""
        ...

    @property
    def calibration_error(self) -> float:
        """See `DraftCounts`; 0 when nothing is estimated."""
        ...


class CheckAll:
    """Every draft is checked."""

    calibration_error = 0.0
    feeds_head = True
    reads_signs = False

    def choose(self, signs: Signs, room: Int32, num_useful: Int32, num_other: int) -> Int32:
        return room

    def wants_drafts(self, num_rows: int) -> bool:
        return True

    def rest(self, num_rows: int, seconds: float) -> None:
        pass

    def observe(self, signs: Signs, num_checked: Int32, num_accepted: Int32) -> None:
        pass

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        pass

    def observe_drafting(self, num_rows: int, seconds: float) -> None:
        pass


class CheckWorthwhile:
    """As many drafts as bring the most accepted tokens a second, and those that survive most likely.

    The survival of draft j is the product of the calibrated chances of drafts 1 .. j. With the survivals of
    all rows in falling order, checking the first N of them gives rows + (sum of these N) tokens in the
    time of a step of rows + N tokens; the best N is taken, none among the candidates.

    Nothing is lost by choosing, since a draft that is not checked is not accepted either, and the token in its
    place is then drawn as without drafts. With `rejection` there is one more condition: whether draft j is
    checked must not depend on its token, or the draws that remain would no longer follow the target. It holds:
    the signs of draft j are computed from the drafts before it, and so is whether one of these ends the answer.

    When even the best N does not pay for the drafting itself, drafting stops. It is tried again after FIRST_PROBE plain
    steps, then after twice as many, ... PROBE_STEPS, or as soon as fewer rows make it pay. Meanwhile the head reads
    nothing along; it then knows a shorter window. While drafting goes on, one step after every DRAFTED_STEPS is plain,
    since its time is what drafting is measured against.
    """

    reads_signs = True

    def __init__(self, num_drafts: int, step_costs: StepCosts, draft_costs: StepCosts) -> None:
        self.step_costs, self.draft_costs = step_costs, draft_costs
        self._calibration = Calibration(num_drafts)
        self._mean_survival = np.zeros(num_drafts)
        self._places = np.arange(num_drafts)
        self._num_observed = 0
        self._num_plain, self._patience = 0, FIRST_PROBE  # plain steps, and after how many drafts are tried
        self._num_tries = TRIED_STEPS  # steps that draft whatever that costs; nothing is known yet
        self._is_try = False
        self._num_drafted = 0  # steps with drafts since the last plain one
        self._rate = RATE  # for the time of the step that is under way
        self._num_rows = 0  # of the last plain step that was looked at

    @property
    def calibration_error(self) -> float:
        return self._calibration.error

    def choose(self, signs: Signs, room: Int32, num_useful: Int32, num_other: int) -> Int32:
        room = np.minimum(room, num_useful)
        total = int(np.maximum(room, 0).sum())
        if total == 0:
            return np.minimum(room, 0)
        survival: Float64 = self._calibration.chances(signs).cumprod(axis=1)
        survival[self._places >= num_useful[:, None]] = 0.0
        has_room = (room > 0).astype(np.float64)
        self._note_survival(has_room @ survival / has_room.sum())
        values = np.where(self._places < room[:, None], survival, -1.0).ravel()
        order = (-values).argsort(kind="stable")[:total]
        num_rows = int(np.count_nonzero(room >= 0))
        gained = np.concatenate(([num_rows], values[order])).cumsum()
        seconds = self.step_costs.seconds(np.arange(num_other + num_rows, num_other + num_rows + total + 1))
        best = int((gained / (seconds + self.draft_costs.seconds(num_rows))).argmax())
        chosen = np.bincount(order[:best] // survival.shape[1], minlength=len(room))
        return np.where(room < 0, -1, chosen).astype(np.int32)

    def wants_drafts(self, num_rows: int) -> bool:
        is_sample = self._num_plain == self._num_drafted == 0
        self._rate = SAMPLE_RATE if is_sample or self._is_try else RATE
        if self._num_drafted >= DRAFTED_STEPS:
            self._num_drafted = 0
            return False
        tokens = np.concatenate(([1.0], self._mean_survival)).cumsum()
        seconds = self.step_costs.seconds(num_rows * np.arange(1, len(tokens) + 1))
        with_drafts = (tokens / (seconds + self.draft_costs.seconds(num_rows))).max()
        if with_drafts > MARGIN / seconds[0]:
            self._patience = FIRST_PROBE
        elif self._num_plain >= self._patience:
            self._num_tries, self._patience = TRIED_STEPS, min(2 * self._patience, PROBE_STEPS)
        self._is_try = self._num_tries > 0
        if self._is_try or with_drafts > MARGIN / seconds[0]:
            self._num_tries = max(self._num_tries - 1, 0)
            self._num_plain = 0
            self._num_drafted += 1
            return True
        self._num_plain += 1
        self._num_drafted = 0
        return False

    @property
    def feeds_head(self) -> bool:
        return self._num_plain == 0 or self._num_plain >= self._patience - FEED_STEPS

    def rest(self, num_rows: int, seconds: float) -> None:
        if self.feeds_head:  # the plans that are not plain are on their way
            return
        if num_rows == self._num_rows and (self._num_plain + 1) % LOOK_STEPS:
            self._num_plain += 1
            return
        self._num_rows = num_rows
        self.step_costs.observe(num_rows, seconds)
        self.wants_drafts(num_rows)

    def observe(self, signs: Signs, num_checked: Int32, num_accepted: Int32) -> None:
        self._calibration.observe(signs, num_checked, num_accepted)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        self.step_costs.observe(num_tokens, seconds, self._rate)

    def observe_drafting(self, num_rows: int, seconds: float) -> None:
        self.draft_costs.observe(num_rows, seconds, SAMPLE_RATE if self._is_try else RATE)

    def _note_survival(self, survival: Float64) -> None:
        self._num_observed += 1
        self._mean_survival += max(MEAN_RATE, 1.0 / self._num_observed) * (survival - self._mean_survival)
