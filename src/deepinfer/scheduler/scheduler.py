"""The scheduler: requests in, one StepPlan a step down, results of steps back into requests (`results.py`).

Planning never waits for results: a decode row moves on when it is planned, its token and its drafts are
read on the device, and where it begins there depends on how many drafts of the rows before it were
accepted. So several plans may be in flight; the device runs them in order and `update` takes their
results in that order. A row has blocks for all its drafts and for all those in flight. Blocks and slots
freed while a plan is in flight may thus be given to any later plan. Results of requests that ended
meanwhile are dropped.

Preemption. A decode row that needs a block when none is free takes those of the last request in
the order "lower priority number, more computed tokens, earlier admission", which may be itself.
The victim keeps its tokens, keeps its slot until no token of it is in flight, and waits at the
place of its arrival to be computed again.

This cannot livelock. Say no new token were ever planned from some step on, though requests exist.
A decode row that gets its block is planned and gives a token, so from then on every decode row is
preempted, and then no decode row is left. Prefill holds all the blocks it needs from admission
on, so without decode rows nothing is preempted; decode rows never fill a step while a prefill
waits (max_step_tokens >= slots), so the oldest prefill advances each step until it samples: a new
token. If no prefill is left either, all blocks are free and the first waiting request is admitted,
since `add` refused what does not fit in all blocks. Either way a token is planned: contradiction.
Tokens are never lost by a preemption and their number is bounded, so every request ends.

Thrashing is rare because a request is admitted only with blocks for its next token too, and with
one block left over for each running request that has yet to grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.cache.manager import CacheManager
from deepinfer.config.engine import ImageOptions, ReplayMode, SchedulerOptions
from deepinfer.errors import RequestError
from deepinfer.images.messages import EncodePlan, EncodeResult, ImagePlace
from deepinfer.messages import (
    Finished,
    FinishReason,
    GenerateRequest,
    Int32,
    SlotSetup,
    StepOutput,
    StepPlan,
    StepResult,
)
from deepinfer.scheduler.budget import StepBudget
from deepinfer.scheduler.images import ImageWork, chunk_end
from deepinfer.scheduler.queue import WaitingQueue
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.results import StepResults
from deepinfer.scheduler.state import SlotState
from deepinfer.scheduler.steps import Chunk, InFlight
from deepinfer.scheduler.table import RequestTable

MAX_PRIORITY = 2**31 - 1


class Scheduler:
    """Decides what every step computes. Not thread-safe; one owner calls everything.

    eos_token_ids: tokens that end an answer unless the request ignores them.
    decoder_replay, replay_keep_tokens: see `ModelOptions`; scored requests always use full.
    num_drafts: drafts that a decode row can check; the device may check fewer.
    images: requests that wait for the embeddings of their images; one of its own when None.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        cache: CacheManager,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        decoder_replay: ReplayMode = "full",
        replay_keep_tokens: int = 140,
        num_drafts: int = 0,
        images: ImageWork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert options.max_step_tokens is not None, "whoever knows the device has chosen it"
        assert cache.num_slots <= options.max_step_tokens, "a step must hold a token of every slot"
        self._max_step_tokens = options.max_step_tokens
        self._max_chunk_tokens = options.max_chunk_tokens or options.max_step_tokens
        self._max_prefill_tokens = options.max_prefill_tokens or options.max_step_tokens
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._replay_keep_tokens = replay_keep_tokens if decoder_replay == "bounded" else max_model_len
        self._num_drafts = num_drafts
        self._clock = clock
        self._num_arrivals = 0
        self._cache = cache
        self._state = SlotState(cache.num_slots, vocab_size, eos_token_ids)
        self._queue = WaitingQueue(options.max_queue)
        self._images = images or ImageWork(ImageOptions(), options.max_queue, bytes_per_token=1)
        self._table = RequestTable(self._state, cache, self._queue, self._images, clock)
        self._results = StepResults(self._table, clock, wants_drafts=num_drafts > 0)

    # -- requests

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._table) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission or their images, preempted ones among them."""
        return self._table.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come yet."""
        return len(self._results)

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave up its blocks."""
        return self._table.num_preemptions

    @property
    def num_not_finite(self) -> int:
        """Requests that ended because the model's logits were no numbers."""
        return self._table.num_not_finite

    def has_work(self) -> bool:
        """Whether a request has not ended or a result is still to come, but for what waits for an encoder at work.

        While it is true, `schedule` or `schedule_images` gives a plan or a result is in flight.
        """
        is_at_work = len(self._table) > self._images.num_waiting or len(self._results) > 0
        return is_at_work or self._images.has_work()

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError (QueueFullError when the queue is full); then nothing is queued."""
        self._refuse_unfit(request)
        num_prompt = len(request.token_ids)
        is_scored = request.wants_prompt_logits or request.params.prompt_logprobs is not None
        keep = num_prompt if is_scored else self._replay_keep_tokens
        self._table.add(Request(
            request_id=request.request_id,
            prompt=np.ascontiguousarray(request.token_ids, dtype=np.int32),
            params=request.params,
            priority=request.priority,
            arrival=request.arrival,
            sequence=self._num_arrivals,
            decoder_start=max(0, num_prompt - keep),
            wants_prompt_logits=request.wants_prompt_logits,
            bad_word_ids=request.bad_word_ids,
            grammar=request.grammar,
            images=request.images,
        ))  # fmt: skip
        self._num_arrivals += 1

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request from outside, wherever it stands; False when it is unknown or has ended.

        reason: "abort", or "stop" when the frontend found a stop text.

        Its `Finished` comes with `take_finished` or the next `update`; no token of it comes after.
        """
        request = self._table.find(request_id)
        if request is None:
            return False
        self._table.end(request, reason, self._clock())
        return True

    def take_finished(self) -> list[Finished]:
        """Ends that were not handed out yet; an id may be used again once its end was."""
        return self._table.take_finished()

    # -- planning

    def schedule_images(self) -> EncodePlan | None:
        """Images to encode beside the steps; None when there are none or an encoder is at work."""
        for request in self._images.take_ready():
            self._queue.put_back(request)
        return self._images.plan()

    def update_images(self, result: EncodeResult) -> None:
        """Take the result of the images in flight; prompts that are complete with them can be computed."""
        self._images.update(result)

    def schedule(self) -> StepPlan | None:
        """The next step: decode rows, then prefill rows; None when nothing can be computed now."""
        budget = StepBudget(self._max_step_tokens, self._max_chunk_tokens, self._max_prefill_tokens)
        decoding, counts = self._take_decode_rows(budget)
        setups: list[SlotSetup] = []
        chunks = self._take_chunks(budget, setups)
        if not len(decoding) and not chunks:
            return None
        plan = self._build_plan(decoding, counts, chunks, setups)
        is_single = not chunks and not self._results.wants_drafts
        plan.is_plain = is_single and self._results.are_single
        sampling, most = plan.slots, plan.counts
        if chunks:
            sampling, most = sampling[plan.samples], np.where(plan.is_prefill, 1, most)[plan.samples]
        self._state.plan_row(sampling, most)
        logit_rows = [(len(decoding) + row, chunk) for row, chunk in enumerate(chunks) if chunk.wants_logits]
        scored = [chunk for chunk in chunks if chunk.num_logprobs]
        serials = self._state.serial[sampling]
        self._results.expect(InFlight(plan.step, sampling, serials, most, is_single, logit_rows, scored))
        return plan

    def _take_decode_rows(self, budget: StepBudget) -> tuple[Int32, Int32]:
        """Slots and token counts of the decode rows, all with blocks; preempts where a row has none for one token.

        A row gets as many drafts as the budget has for each, but no block of another request for them.
        """
        state, cache = self._state, self._cache
        slots = state.decoding()
        is_shared = bool(self._table.prefilling) or len(self._queue) > 0
        # An image is never cut, so drafts leave it the whole step.
        is_drafting = self._results.wants_drafts and not any(request.images for request in self._table.prefilling)
        num_drafts = self._num_drafts if is_drafting else 0
        most = 1 + budget.drafts_per_row(len(slots), num_drafts, is_shared=is_shared)
        ends = np.minimum(state.num_computed[slots] + most, state.limit[slots])
        is_needy = cache.needs_blocks(slots, ends)
        if is_needy.any():
            self._grow(slots[is_needy], most)
            slots = slots[state.is_active[slots]]
        counts = np.ones(len(slots), dtype=np.int32)
        if most > 1:
            room = np.minimum(cache.num_slot_blocks[slots] * cache.block_tokens, state.limit[slots])
            counts = np.clip(room - state.num_computed[slots], 1, most).astype(np.int32)
        budget.take_decode(len(slots) if most == 1 else int(counts.sum()))
        return slots, counts

    def _grow(self, slots: Int32, most: int) -> None:
        """Give decode rows that need them blocks for one token, and for up to `most` if there are any left."""
        state, cache = self._state, self._cache
        for slot in state.best_first(slots).tolist():
            end = min(int(state.num_computed[slot]) + 1, int(state.limit[slot]))
            while state.is_active[slot] and not cache.grow(slot, end):
                self._table.preempt(int(state.best_first(np.flatnonzero(state.is_active).astype(np.int32))[-1]))
        for slot in slots[state.is_active[slots]].tolist():
            cache.grow(slot, min(int(state.num_computed[slot]) + most, int(state.limit[slot])))

    def _take_chunks(self, budget: StepBudget, setups: list[SlotSetup]) -> list[Chunk]:
        """Prefill rows of the admitted requests, then of newly admitted ones, as far as the budget goes."""
        taken = [self._take_chunk(request, budget) for request in self._table.prefilling if budget.prefill_left]
        while budget.prefill_left:
            request = self._admit_next()
            if request is None:
                break
            setups.append(request.setup())
            taken.append(self._take_chunk(request, budget))
        if chunks := [chunk for chunk in taken if chunk is not None]:
            done = {chunk.slot for chunk in chunks if chunk.samples}
            self._table.prefilling = [request for request in self._table.prefilling if request.slot not in done]
        return chunks

    def _take_chunk(self, request: Request, budget: StepBudget) -> Chunk | None:
        """The request's next chunk; None when it begins with an image that does not fit any more."""
        state, slot, images = self._state, request.slot, request.images
        start, prefill_end = int(state.num_computed[slot]), int(state.prefill_end[slot])
        if not images:
            end = start + budget.take_chunk(prefill_end - start)
        else:
            end = start + budget.take_chunk(
                prefill_end - start, lambda count: chunk_end(images, start, start + count) - start
            )
            if end == start:
                return None
            if start < images[-1].end <= end:
                self._images.release(request, self._table.newest_step + 1)
        state.num_computed[slot] = end
        wants_logits = request.wants_prompt_logits and start < len(request.prompt)
        return Chunk(request, slot, start, end, end == prefill_end, wants_logits)

    def _admit_next(self) -> Request | None:
        """Move the first waiting request into a slot; None when there is none or it has to wait."""
        request = self._queue.first()
        if request is None or request.slot:  # it still drains
            return None
        num_tokens = min(request.num_tokens + 1, request.limit)
        if not self._cache.can_admit(num_tokens, reserve_blocks=self._num_yet_to_grow()):
            return None
        return self._table.admit(num_tokens)

    def _num_yet_to_grow(self) -> int:
        """Running requests whose longest answer needs more blocks than they hold."""
        limits = np.where(self._state.is_active, self._state.limit, 0)
        return int(np.count_nonzero(limits > self._cache.num_slot_blocks * self._cache.block_tokens))

    def _build_plan(self, decoding: Int32, counts: Int32, chunks: list[Chunk], setups: list[SlotSetup]) -> StepPlan:
        state, num_decode = self._state, len(decoding)
        starts, slots = state.num_known[decoding] + (state.num_rows_ahead[decoding] - 1), decoding
        samples, wants_logits = np.ones(num_decode, dtype=np.bool_), np.zeros(num_decode, dtype=np.bool_)
        host_tokens = np.zeros(0, dtype=np.int32)
        if chunks:
            slots = np.append(slots, np.array([chunk.slot for chunk in chunks], dtype=np.int32))
            starts = np.append(starts, np.array([chunk.start for chunk in chunks], dtype=np.int32))
            counts = np.append(counts, np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32))
            samples = np.append(samples, [chunk.samples for chunk in chunks])
            wants_logits = np.append(wants_logits, [chunk.wants_logits for chunk in chunks])
            host_tokens = np.concatenate([chunk.request.tokens(chunk.start, chunk.end) for chunk in chunks])
        is_prefill = np.zeros(len(slots), dtype=np.bool_)
        is_prefill[num_decode:] = True
        self._table.newest_step += 1
        table_slots, table_columns, table_blocks = self._cache.take_changes()
        plan = StepPlan(
            step=self._table.newest_step,
            slots=slots,
            starts=starts,
            counts=counts,
            decoder_starts=state.decoder_start[slots],
            is_prefill=is_prefill,
            samples=samples,
            wants_logits=wants_logits,
            host_tokens=host_tokens,
            table_slots=table_slots,
            table_columns=table_columns,
            table_blocks=table_blocks,
            setups=setups,
            images=[
                ImagePlace(num_decode + row, span.start, span.image.num_tokens, span.image.key)
                for row, chunk in enumerate(chunks)
                for span in chunk.request.images
                if chunk.start <= span.start < chunk.end
            ],
        )
        scored = [(num_decode + row, chunk) for row, chunk in enumerate(chunks) if chunk.num_logprobs]
        if scored:
            plan.logprob_rows = np.array([row for row, _ in scored], dtype=np.int32)
            plan.logprob_counts = np.array([chunk.num_logprobs for _, chunk in scored], dtype=np.int32)
            plan.logprob_targets = np.concatenate(
                [chunk.request.prompt[chunk.start + 1 :][: chunk.num_logprobs] for _, chunk in scored]
            )
        return plan

    # -- results

    def update(self, result: StepResult) -> StepOutput:
        """Take the result of the oldest plan in flight: new tokens, and requests that ended by them.

        The token that ended a request is among the tokens. Lines of the output are in row order.
        """
        return self._results.take(result)

    def check(self) -> None:
        """Assert that queue, slots, state and cache agree; for tests and for the idle engine."""
        self._table.check()

    def _refuse_unfit(self, request: GenerateRequest) -> None:
        name, num_prompt, max_tokens = request.request_id, len(request.token_ids), request.params.max_tokens
        assert max_tokens is not None, "max_tokens is filled in by the frontend"
        if self._table.is_in_use(name):
            raise RequestError(f"request id {name!r} is in use; choose another, or wait until that request has ended")
        if num_prompt == 0:
            raise RequestError(f"request {name!r} has an empty prompt; give at least one token")
        if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            raise RequestError(
                f"request {name!r}: priority is {request.priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        request.params.check_ids(self._vocab_size)
        if num_prompt + max_tokens > self._max_model_len:
            raise RequestError(
                f"request {name!r}: max_tokens is {max_tokens} but prompt ({num_prompt} tokens) + max_tokens must be "
                f"<= {self._max_model_len}; lower max_tokens or raise --max-model-len"
            )
        num_blocks = self._cache.blocks_for(num_prompt + max_tokens - 1)
        if num_blocks > self._cache.num_blocks:
            raise RequestError(
                f"request {name!r}: prompt ({num_prompt} tokens) + max_tokens ({max_tokens}) needs {num_blocks} cache "
                f"blocks of {self._cache.block_tokens} tokens but only {self._cache.num_blocks} exist; "
                "lower max_tokens or raise --num-blocks"
            )
        largest = max((span.image.num_tokens for span in request.images), default=0)
        if largest > (room := self._max_step_tokens - self._cache.num_slots + 1):
            raise RequestError(
                f"request {name!r} has an image of {largest} tokens, computed in one step, but a step has room for "
                f"{room}; give a smaller image or raise --max-step-tokens"
            )
