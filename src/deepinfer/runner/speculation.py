"""Speculation: the drafts of one engine between two steps, on the device's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.config.engine import DraftAcceptance
from deepinfer.messages import Bool, DraftCounts, Int32, Int64, SlotSetup, StepPlan, StepResult
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.transfer import Arrival, Moment
from deepinfer.runner.batch import BatchBuilder
from deepinfer.runner.drafts import DraftRows, Drafts
from deepinfer.runner.lines import Lines
from deepinfer.sampling.before import Before
from deepinfer.sampling.rejection import DRAFT_NOISE, Proposed
from deepinfer.sampling.sampler import Sampled, Sampler
from deepinfer.speculate.calibration import Signs
from deepinfer.speculate.policy import DraftPolicy
from deepinfer.speculate.progress import SlotProgress, decode_rows
from deepinfer.speculate.verify import checked_drafts, count_tokens
from deepinfer.structured.rows import ConstrainedRows


@dataclass(frozen=True)
class _Drafted:
    """Drafts on their way to the host, and when the device began with them."""

    slots: Int32
    arrival: Arrival
    begin: Moment


class Speculation:
    """Proposes drafts after each step and says which of them the next one checks and keeps.

    Called by the device thread, in this order for each step: `wait`, `set_slots`, `resolve`, `before`, `follow`,
    `verify`, where nothing follows `propose`, and `report`; only `rest` between the first and the last for a plain one.
    Nobody waits for the drafts: the next step is planned and, where the policy does not look at them, queued while they
    are made.
    acceptance: see `SpeculateOptions`.
    """

    def __init__(
        self,
        drafts: Drafts,
        builder: BatchBuilder,
        sampler: Sampler,
        policy: DraftPolicy,
        num_slots: int,
        eos_ids: Sequence[int],
        acceptance: DraftAcceptance = "coupled",
    ) -> None:
        num_drafts = self.num_drafts = drafts.num_places
        self._drafts, self._builder, self._sampler, self._policy = drafts, builder, sampler, policy
        self._on_way: _Drafted | None = None
        self._checked: tuple[Int32, Int32, Int32] | None = None  # slots, checked and accepted drafts of a step
        self._expected = np.zeros(0, dtype=np.int32)  # the drafts that a step checks, of each line
        self.progress = SlotProgress(num_slots)
        self._tokens = np.zeros((num_slots + 1, num_drafts), dtype=np.int32)
        self._signs = np.zeros((len(Signs._fields), num_slots + 1, num_drafts), dtype=np.float32)
        self._no_signs = Signs(*self._signs[:, :0])
        self._num_ready = np.zeros(num_slots + 1, dtype=np.int32)
        self._num_useful = np.zeros(num_slots + 1, dtype=np.int32)
        nothing = np.zeros(num_drafts, dtype=np.int64)
        self._counts = DraftCounts(nothing, nothing, nothing, 0, 0.0)
        self._eos_ids, self._ignores_eos = tuple(eos_ids), np.zeros(num_slots + 1, dtype=np.bool_)
        self._is_coupled = acceptance == "coupled"
        self._drawn_from: Tensor | None = None  # with rejection: logits [num_slots + 1, drafts, vocab] of the drafts
        self._num_known = np.zeros(num_slots + 1, dtype=np.int32)
        self._main_starts = np.zeros(num_slots + 1, dtype=np.int32)  # from where on the head has read every position
        self._is_resting = False
        self._is_wanted = False  # drafts behind the step

    def wait(self) -> None:
        """Wait for the newest drafts where the policy looks at them, so that no step's time contains them."""
        if self._policy.reads_signs:
            self._receive()

    def set_slots(self, setups: Sequence[SlotSetup]) -> None:
        """New occupants, without drafts until they have sampled."""
        for setup in setups:
            self.progress.set_slot(setup)
            self._num_ready[setup.slot] = 0
            self._ignores_eos[setup.slot] = setup.params.ignore_eos
            self._num_known[setup.slot] = len(setup.token_ids)
            self._main_starts[setup.slot] = 0

    def feeds_draft(self, plan: StepPlan, window: int) -> bool:
        """Whether the head reads along in this resolved plan.

        It does for decode rows where the policy says so, and for prompts in their last window.
        """
        is_prefill = plan.is_prefill
        if self._policy.feeds_head and not (plan.has_prefill and is_prefill.all()):
            return True
        ends = plan.starts + plan.counts
        if (is_prefill & (ends > self._num_known[plan.slots] - window)).any():
            return True
        decoding = plan.slots[~is_prefill]
        self._main_starts[decoding] = ends[~is_prefill]
        return False

    def resolve(self, plan: StepPlan, constraints: ConstrainedRows | None) -> StepPlan:
        """The plan as it runs: each decode row begins where it really is and checks what the policy chooses."""
        rows = decode_rows(plan)
        slots = plan.slots[rows]
        if self._is_resting:  # rows have moved on meanwhile, to where the plan says
            self._num_ready[slots], self._is_resting = 0, False
            self.progress.starts[slots] = self._main_starts[slots] = plan.starts[rows]
        room, ready = self.progress.room(plan), self._num_ready[slots]
        room = np.minimum(room, ready)
        if not ready.any():
            return self.progress.resolve(plan, room)
        if constraints is not None and constraints.has_any(slots):
            self._receive()
            room = constraints.limit_drafts(slots, self._tokens, room)
        num_other = plan.num_tokens - int(plan.counts[rows].sum()) if plan.has_prefill else 0
        chosen = self._policy.choose(self._signs_of(slots), room, self._num_useful[slots], num_other)
        return self.progress.resolve(plan, chosen)

    def rest(self, num_rows: int, seconds: float) -> None:
        """A plain step of so many rows took so long; nothing of it is noted but that."""
        self._is_resting = True
        self._policy.rest(num_rows, seconds)

    def before(self, lines: Lines) -> Before | None:
        """The drafts before each line; None when no row checks any, or none whose earlier tokens matter."""
        self._receive()
        if lines.is_single:
            return None
        self._expected = checked_drafts(self._tokens[lines.slots], lines.counts, lines.line_places)
        if not self._sampler.remembers(lines.slots):
            return None
        return Before(self._builder.int64(self._tokens[lines.line_slots]), lines.line_places)

    def drafts(self, lines: Lines) -> Int32:
        """The drafts of each row [rows, drafts], of which it checks the first counts - 1."""
        self._receive()
        return self._tokens[lines.slots]

    def proposed(self, lines: Lines) -> Proposed | None:
        """With rejection, the drafts that the step checks; None when it checks none."""
        if self._is_coupled or lines.is_single or self._drawn_from is None:
            return None
        checks = np.flatnonzero(lines.line_places < np.repeat(lines.counts - 1, lines.counts))
        where = lines.line_slots[checks], lines.line_places[checks]
        slots, places = (self._builder.int64(index) for index in where)
        return Proposed(checks, self._builder.int64(self._tokens[where]), self._drawn_from[slots, places])

    def verify(self, lines: Lines, token_ids: Int32, is_usable: Bool) -> Int32:
        """Tokens that each row keeps [rows], of those drawn [lines]; 0 for the padding rows."""
        num_tokens = (lines.slots > 0).astype(np.int32)
        if not lines.is_single:
            num_tokens *= count_tokens(token_ids, is_usable, self._expected, lines.offsets)
            self._checked = lines.slots, lines.counts - 1, num_tokens - 1
        self.progress.starts[lines.slots] = lines.firsts + num_tokens - 1
        self._num_ready[lines.slots] = 0
        if self._on_way is not None:
            self._expect(lines.slots[self.progress.goes_on(lines.slots, self.progress.starts[lines.slots])])
        return num_tokens

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step of decode rows took so long up to here, drafting not included."""
        self._policy.observe_step(num_tokens, seconds)

    def follow(
        self, lines: Lines, drawn: Sampled, rows: TokenBatch | None, constraints: ConstrainedRows | None
    ) -> bool:
        """Queue the drafting behind a step that nobody has seen the tokens of, which stores the newest ones too.

        So the device does not wait for the host between the two. False where that cannot be: stages or a grammar change
        draws, a pass or the step (rows: see `Computed`) is not captured, or there is nothing to draft.
        """
        num_rows = int(self.progress.goes_on(lines.slots, lines.firsts).sum())
        self._is_wanted = num_rows > 0 and self._policy.wants_drafts(num_rows)
        if not (self._is_wanted and rows is not None and self._is_coupled):
            return False
        if constraints is not None and constraints.has_any(lines.slots):
            return False
        draws = self._sampler.plain_draws(lines.slots, lines.firsts - 1)
        if draws is None:
            return False
        begin, unknown = Moment(self._builder.device), np.zeros_like(lines.slots)
        window_starts = np.maximum(lines.decoder_starts, self._main_starts[lines.slots])
        drafted = self._drafts.follow(
            DraftRows(lines.slots, unknown, unknown, window_starts),
            draws,
            lambda newest: self._builder.verify(drawn.token_ids, drawn.is_finite, rows, newest),
        )
        if drafted is None:
            return False
        assert self._on_way is None, "the drafts of the last step were not taken"
        self._on_way = _Drafted(lines.slots, Arrival(*drafted), begin)
        return True

    def propose(self, lines: Lines, newest: Int32, constraints: ConstrainedRows | None) -> None:
        """Draft what may follow each row's newest token [rows], and leave it where the next step reads tokens."""
        places = np.flatnonzero(self.progress.goes_on(lines.slots, self.progress.starts[lines.slots]))
        if not (self._is_wanted and len(places)):
            return
        assert self._on_way is None, "the drafts of the last step were not taken"
        begin = Moment(self._builder.device)
        slots = lines.slots[places]
        window_starts = np.maximum(lines.decoder_starts[places], self._main_starts[slots])
        rows = DraftRows(slots, newest[places], self.progress.starts[slots], window_starts)
        under_grammar = constraints if constraints is not None and constraints.has_any(slots) else None
        draws = None
        if under_grammar is None and self._is_coupled:
            draws = self._sampler.plain_draws(slots, rows.starts)
        if draws is not None:
            tokens, signs = self._drafts.draft(rows, draws)
        else:
            tokens, signs = self._draw(rows, under_grammar)
            self._drafts.store(rows, tokens)
        self._on_way = _Drafted(slots, Arrival(tokens, signs), begin)
        self._expect(slots)

    def _expect(self, slots: Int32) -> None:
        """Drafts for these slots are on their way."""
        self._num_ready[slots] = self.num_drafts
        self._counts = dataclasses.replace(self._counts, proposed=self._counts.proposed + len(slots))

    def _receive(self) -> None:
        """Take the drafts that are on their way; a new occupant of one of their slots has none ready."""
        if self._on_way is None:
            return
        drafted, self._on_way = self._on_way, None
        tokens, signs = drafted.arrival.wait()
        self._tokens[drafted.slots] = tokens
        self._num_useful[drafted.slots] = self._count_to_end(drafted.slots, tokens)
        self._signs[:, drafted.slots] = signs.transpose(1, 0, 2)
        self._policy.observe_drafting(len(drafted.slots), drafted.arrival.there.seconds_since(drafted.begin))

    def _draw(self, rows: DraftRows, under_grammar: ConstrainedRows | None) -> tuple[Tensor, Tensor]:
        """Drafts [rows, drafts] as the sampler would draw them one after the other, and their signs."""
        num_rows, slots = len(rows), rows.slots
        x, logits = (value.unflatten(0, (num_rows, -1)) for value in self._drafts.block(rows))
        previous = self._builder.int64(rows.newest)
        tokens, signs = previous.new_zeros(num_rows, self.num_drafts), []
        for place in range(self.num_drafts):
            row, confidence = self._drafts.next(logits[:, place], x[:, place], previous)
            before = Before(tokens, np.full(num_rows, place, dtype=np.int32)) if place else None
            masks = None
            if under_grammar is not None:  # the matcher needs to know the drafts, so this waits for the device
                masks = under_grammar.draft_masks(slots, tokens[:, :place].cpu().numpy())
            noise = 0 if self._is_coupled else DRAFT_NOISE
            drafted = self._sampler.propose(row, slots, rows.starts + place + 1, before, masks, noise=noise)
            self._keep_logits(slots, place, drafted.logits)
            previous = tokens[:, place] = drafted.token_ids
            signs.append(torch.stack([confidence, drafted.logprobs], dim=1))
        return tokens, torch.stack(signs, dim=2)

    def _count_to_end(self, slots: Int32, tokens: NDArray[np.integer]) -> Int32:
        """Drafts [rows], of these [rows, drafts], up to and with the first that ends its answer; all if none does."""
        num_useful = np.full(len(slots), self.num_drafts, dtype=np.int32)
        for eos_id in self._eos_ids:
            rows, places = (tokens == eos_id).nonzero()
            if len(rows):
                np.minimum.at(num_useful, rows, np.where(self._ignores_eos[slots[rows]], self.num_drafts, places + 1))
        return num_useful

    def _keep_logits(self, slots: Int32, place: int, logits: Tensor) -> None:
        """Rejection needs to know what drafts were drawn from."""
        if self._is_coupled:
            return
        if self._drawn_from is None:
            self._drawn_from = logits.new_zeros(len(self._tokens), self.num_drafts, logits.shape[1])
        self._drawn_from[self._builder.int64(slots), place] = logits

    def report(self, result: StepResult) -> None:
        """Note what became of the step's drafts; counters so far, and whether to plan drafts."""
        if self._checked is not None:
            self._note(*self._checked)
            self._checked = None
        result.drafts, result.wants_drafts = self._counts, self._policy.feeds_head

    def _note(self, slots: Int32, checked: Int32, accepted: Int32) -> None:
        """Rows of these slots checked so many drafts and accepted so many [rows]."""
        rows = np.flatnonzero(checked)
        slots, checked = slots[rows], checked[rows]
        accepted = np.maximum(np.minimum(accepted[rows], self._num_useful[slots]), 0)
        self._policy.observe(self._signs_of(slots), checked, accepted)
        self._counts = dataclasses.replace(
            self._counts,
            checked=self._counts.checked + self._by_place(checked),
            accepted=self._counts.accepted + self._by_place(accepted),
            num_rows=self._counts.num_rows + len(rows),
            calibration_error=self._policy.calibration_error,
        )

    def _signs_of(self, slots: Int32) -> Signs:
        """Of the drafts of these slots, if the policy looks at any."""
        return Signs(*self._signs[:, slots]) if self._policy.reads_signs else self._no_signs

    def _by_place(self, counts: Int32) -> Int64:
        """Rows that have a draft at each place [drafts] int64, of so many drafts [rows]."""
        have = np.bincount(counts, minlength=1 + self.num_drafts)[::-1].cumsum()[::-1]
        return have[1:]
