"""RequestTable: every request that has not ended, where it stands, and what it holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.cache.manager import CacheManager
from deepinfer.messages import Finished, FinishReason, Int32
from deepinfer.scheduler.images import ImageWork
from deepinfer.scheduler.queue import WaitingQueue
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.state import SlotState


class RequestTable:
    """A request waits for its images, waits in the queue, or has a slot; a preempted one may wait and have one.

    prefilling: with a slot and prompt tokens to plan, in order of admission.
    draining: preempted, with tokens in flight; they keep their slots until these have come.
    newest_step: number of the newest plan; whoever plans counts it.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        state: SlotState,
        cache: CacheManager,
        queue: WaitingQueue,
        images: ImageWork,
        clock: Callable[[], float],
    ) -> None:
        self.state, self.cache, self.queue, self.images = state, cache, queue, images
        self.prefilling: list[Request] = []
        self.draining: list[Request] = []
        self.newest_step = 0
        self.num_preemptions = 0
        self.num_not_finite = 0
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._occupants: list[Request | None] = [None] * (cache.num_slots + 1)
        self._names = np.full(cache.num_slots + 1, None, dtype=np.object_)  # request id of each occupant
        self._answers = np.full(cache.num_slots + 1, None, dtype=np.object_)  # `generated` of each occupant
        self._finished: list[Finished] = []
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission or their images, preempted ones among them."""
        return len(self.queue) + self.images.num_waiting

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request of this id has not ended, or its end was not handed out."""
        return request_id in self._requests or any(finished.request_id == request_id for finished in self._finished)

    def find(self, request_id: str) -> Request | None:
        """The request of this id; None when it has ended or never came."""
        return self._requests.get(request_id)

    def is_here(self, request: Request) -> bool:
        """Whether this request has not ended; its id may be another's by now."""
        return self._requests.get(request.request_id) is request

    def occupant(self, slot: int) -> Request:
        """The request that has this slot."""
        request = self._occupants[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def add(self, request: Request) -> None:
        """Let a new request wait. Raises QueueFullError; then it is not there."""
        if request.images:
            self.images.add(request)
        else:
            self.queue.add(request)
        self._requests[request.request_id] = request

    def admit(self, num_tokens: int) -> Request:
        """Give the first of the queue a slot and blocks for so many tokens, which must be there."""
        slot = self.cache.admit(num_tokens)
        assert slot is not None, "admission failed after its check"
        request = self.queue.take_first()
        self._num_admissions += 1
        self.state.occupy(slot, request, self._num_admissions)
        self._occupants[slot], self._names[slot], self._answers[slot] = request, request.request_id, request.generated
        self.prefilling.append(request)
        request.slot = slot
        if request.scheduled is None:
            request.scheduled = self._clock()
        return request

    def preempt(self, slot: int) -> None:
        """Take the blocks of a slot's request, which waits at the place of its arrival to be computed again."""
        request = self.occupant(slot)
        self.state.is_active[slot] = False
        self.cache.release_blocks(slot)
        if request in self.prefilling:
            self.prefilling.remove(request)
        if request.images:
            self.images.put_back(request, self.newest_step)
        else:
            self.queue.put_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if self.state.in_flight(slot):
            self.draining.append(request)
        else:
            self._leave_slot(request)

    def append(self, slots: Int32, tokens: Int32, now: float) -> list[str]:
        """Give each slot's request its token; returns the request ids."""
        for slot, answer, token in zip(slots.tolist(), self._answers[slots].tolist(), tokens.tolist(), strict=True):
            if not answer:
                self.occupant(slot).first_token = now
            answer.append(token)
        request_ids: list[str] = self._names[slots].tolist()
        return request_ids

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        """Forget a request, give back what it holds and note its end."""
        del self._requests[request.request_id]
        self.queue.remove(request.request_id)
        if request.images:
            self.images.end(request, self.newest_step)
        if request.slot:
            for requests in (self.prefilling, self.draining):
                if request in requests:
                    requests.remove(request)
            self._leave_slot(request)
        self._finished.append(
            Finished(
                request.request_id,
                reason,
                request.times(now),
                num_preemptions=request.num_preemptions,
                num_checked_drafts=request.num_checked_drafts,
                num_accepted_drafts=request.num_accepted_drafts,
                stop_token=stop_token,
                error=error,
            )
        )

    def end_early(self, request: Request, cause: str, now: float) -> None:
        """End a request by an error of this cause."""
        error = f"request {request.request_id!r} ends after {len(request.generated)} tokens: {cause}"
        self.end(request, "error", now, error=error)

    def end_not_finite(self, request: Request, position: int, now: float) -> None:
        """End a request whose logits for this position are no numbers."""
        self.num_not_finite += 1
        cause = (
            f"the model gave NaN or no finite logit for position {position}; check the checkpoint, "
            "or try --precision float32"
        )
        self.end_early(request, cause, now)

    def take_finished(self) -> list[Finished]:
        """Ends that were not handed out yet; an id may be used again once its end was."""
        finished, self._finished = self._finished, []
        return finished

    def release_drained(self) -> None:
        """Take the slots of preempted requests whose last tokens have come."""
        if self.draining:
            drained = [request for request in self.draining if not self.state.in_flight(request.slot)]
            self.draining = [request for request in self.draining if request not in drained]
            for request in drained:
                self._leave_slot(request)

    def _leave_slot(self, request: Request) -> None:
        self.state.vacate(request.slot)
        self.cache.release(request.slot)
        self._occupants[request.slot] = self._names[request.slot] = self._answers[request.slot] = None
        request.slot = 0

    def check(self) -> None:
        """Assert that queue, slots, state and cache agree; for tests and for the idle engine."""
        state, cache = self.state, self.cache
        cache.check()
        self.images.check()
        held = {request.slot: request for request in self._requests.values() if request.slot}
        occupied = {slot for slot, request in enumerate(self._occupants) if request}
        assert occupied == set(held), f"slots {occupied} have occupants but requests hold {set(held)}"
        assert cache.num_slots - cache.num_free_slots == len(held), "slots are held by nobody"
        assert set(np.flatnonzero(state.serial).tolist()) == set(held), "serials differ from occupants"
        for slot, request in held.items():
            is_draining = not state.is_active[slot]
            assert is_draining == self._waits(request), f"slot {slot} is active and waits, or neither"
            assert is_draining == (request in self.draining), f"slot {slot} drains and is active, or neither"
            assert not is_draining or state.in_flight(slot), f"slot {slot} drains but nothing is in flight"
            assert not is_draining or not cache.num_slot_blocks[slot], f"slot {slot} drains but holds blocks"
            assert state.num_known[slot] == request.num_tokens, f"slot {slot}: known tokens differ"
            assert state.num_computed[slot] <= request.limit, f"slot {slot} is computed past its limit"
            is_prefilling = bool(state.num_computed[slot] < state.prefill_end[slot])
            assert is_draining or is_prefilling == (request in self.prefilling), f"slot {slot}: prefill state differs"
            capacity = cache.num_slot_blocks[slot] * cache.block_tokens
            assert is_draining or state.num_computed[slot] <= capacity, f"slot {slot} is computed past its blocks"
        for request in self._requests.values():
            assert request.slot or self._waits(request), f"request {request.request_id!r} is nowhere"
        assert held or cache.num_free_blocks == cache.num_blocks, "blocks are held though nothing runs"

    def _waits(self, request: Request) -> bool:
        return request.request_id in self.queue or request.request_id in self.images
