"""Results of steps, in the order of their plans, back into requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from deepinfer.messages import Float32, Int32, Int64, Logprobs, StepOutput, StepResult
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.steps import InFlight, comes_after
from deepinfer.scheduler.table import RequestTable


class StepResults:
    """Keeps what is in flight and takes its results.

    wants_drafts: whether the next rows are to check drafts; the device says so with each result.
    """

    def __init__(self, table: RequestTable, clock: Callable[[], float], *, wants_drafts: bool) -> None:
        self.wants_drafts = wants_drafts
        self._table = table
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def are_single(self) -> bool:
        """Whether all that is in flight computes newest tokens only."""
        return all(step.is_single for step in self._in_flight)

    def expect(self, step: InFlight) -> None:
        """A plan went down."""
        self._in_flight.append(step)

    def take(self, result: StepResult) -> StepOutput:
        """Take the result of the oldest plan in flight: new tokens, and requests that ended by them.

        The token that ended a request is among the tokens. Lines of the output are in row order.
        """
        step = self._in_flight.popleft()
        assert step.step == result.step, f"result of step {result.step} came, that of step {step.step} was due"
        now, table, self.wants_drafts = self._clock(), self._table, result.wants_drafts
        state = table.state
        table.images.step_done(step.step)
        prompt_logits = self._take_prompt_logits(step, result)
        prompt_logprobs = self._take_prompt_logprobs(step, result, now)
        num_tokens = step.counts if result.num_tokens is None else result.num_tokens
        num_lines = len(num_tokens) if result.num_tokens is None else num_tokens.sum()
        assert len(num_tokens) == len(step.slots), f"results of {len(num_tokens)} rows for {len(step.slots)}"
        assert len(result.token_ids) == num_lines, f"{len(result.token_ids)} tokens, not {num_lines}"
        is_current = state.serial[step.slots] == step.serials
        current = step.slots[is_current]
        state.take_row(current, step.counts[is_current], num_tokens[is_current])
        is_usable = result.is_finite if result.has_choice is None else result.is_finite & result.has_choice
        slots, is_wanted = step.slots, is_current
        if result.num_tokens is not None:
            slots, is_wanted = np.repeat(slots, num_tokens), np.repeat(is_wanted, num_tokens)
        ends_answer = is_usable & state.ends_answer(slots, result.token_ids * is_usable)
        if result.num_tokens is not None:
            is_wanted &= ~comes_after(ends_answer, num_tokens)
        is_kept = is_wanted & is_usable
        if result.num_checked is not None:
            rows = np.repeat(np.arange(len(step.slots)), num_tokens)
            num_kept = np.bincount(rows[is_kept], minlength=len(step.slots))
            num_accepted = np.minimum(num_kept, num_tokens - 1)  # the last that a row gives is no draft
            self._count_drafts(current, result.num_checked[is_current], num_accepted[is_current])
        kept, tokens, logprobs = slots, result.token_ids, result.logprobs
        if not is_kept.all():
            kept, tokens = kept[is_kept], tokens[is_kept]
            logprobs = None if logprobs is None else logprobs.lines(is_kept)
        request_ids = table.append(kept, tokens, now)
        is_end = is_wanted & (ends_answer | ~is_usable)
        is_full = state.num_known[current] > state.limit[current]
        if is_end.any() or is_full.any():
            for line in np.flatnonzero(is_end).tolist():
                self._end_at(self._table.occupant(slots[line]), line, result, now)
            for slot in current[is_full & (state.serial[current] > 0)].tolist():
                self._table.end(self._table.occupant(slot), "length", now)
        table.release_drained()
        return StepOutput(request_ids, tokens, logprobs, table.take_finished(), prompt_logits, prompt_logprobs)

    def _count_drafts(self, slots: Int32, num_checked: Int32, num_accepted: Int64) -> None:
        rows = np.flatnonzero(num_checked)
        for slot, checked, accepted in zip(
            *(part[rows].tolist() for part in (slots, num_checked, num_accepted)), strict=True
        ):
            request = self._table.occupant(slot)
            request.num_checked_drafts += checked
            request.num_accepted_drafts += max(0, accepted)

    def _take_prompt_logits(self, step: InFlight, result: StepResult) -> list[tuple[str, int, Float32]]:
        """Logits of prompt positions that were not handed out before a preemption."""
        lines: list[tuple[str, int, Float32]] = []
        for row, chunk in step.logit_rows:
            request = chunk.request
            start, end = max(chunk.start, request.num_logits), min(chunk.end, len(request.prompt))
            if start < end and self._table.is_here(request):
                logits = result.prompt_logits[row][start - chunk.start : end - chunk.start]
                lines.append((request.request_id, start, logits))
                request.num_logits = end
        return lines

    def _take_prompt_logprobs(self, step: InFlight, result: StepResult, now: float) -> list[tuple[str, int, Logprobs]]:
        """The same of log-probabilities; a request with one that is no number ends here."""
        found: list[tuple[str, int, Logprobs]] = []
        first = 0
        for chunk in step.logprob_chunks:
            assert result.prompt_logprobs is not None, "a plan asked for log-probabilities of prompt tokens"
            request, lines = chunk.request, result.prompt_logprobs.lines(slice(first, first + chunk.num_logprobs))
            first += chunk.num_logprobs
            start, end = max(chunk.start, request.num_logprobs), chunk.start + chunk.num_logprobs
            if start >= end or not self._table.is_here(request):
                continue
            if np.isnan(lines.values).any():
                self._table.end_not_finite(request, chunk.start + int(np.isnan(lines.values).argmax()) + 1, now)
                continue
            found.append((request.request_id, start + 1, lines.lines(slice(start - chunk.start, None))))
            request.num_logprobs = end
        return found

    def _end_at(self, request: Request, line: int, result: StepResult, now: float) -> None:
        """End a request at a line that ends its answer, or that holds no token."""
        if (cause := result.errors.get(line)) is not None:
            self._table.end_early(request, cause, now)
        elif not result.is_finite[line]:
            self._table.end_not_finite(request, request.num_tokens, now)
        elif result.has_choice is None or result.has_choice[line]:
            self._table.end(request, "stop", now, stop_token=int(result.token_ids[line]))
        else:
            cause = (
                f"its own parameters exclude every token of the vocabulary at position {request.num_tokens}; "
                "allow more tokens (allowed_token_ids, bad_words, min_tokens, a grammar)"
            )
            self._table.end_early(request, cause, now)
