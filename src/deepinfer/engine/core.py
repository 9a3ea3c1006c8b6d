"""The step loop of one engine: plan, run, apply, with one step planned ahead of the device, images encoded beside."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from deepinfer.cache.manager import CacheManager
from deepinfer.engine.device_thread import DeviceThread, Executor
from deepinfer.engine.stats import EngineStats
from deepinfer.images.messages import EncodePlan, EncodeResult
from deepinfer.messages import DraftCounts, FinishReason, GenerateRequest, OpCheck, StepOutput, StepPlan, StepResult
from deepinfer.scheduler.scheduler import Scheduler


class EngineCore:
    """Scheduler and device side of one engine; `step` is called by one thread.

    With `is_async`, step n + 1 is planned and handed over while step n runs: the plan does not
    need step n's tokens, since the device reads them from its own rings. A request that turns out
    to have ended in step n leaves one surplus row behind, whose result is dropped.

    encoder: encodes images in a thread of its own; None = the model takes none. `on_encoded` is called there
    when it is done, so that the next `step` can be made.

    `add` and `finish` may be called from any thread; they wait for planning, never for
    the device.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        executor: Executor[StepPlan, StepResult],
        encoder: Executor[EncodePlan, EncodeResult] | None = None,
        *,
        is_async: bool,
    ):
        self.scheduler, self.executor, self._cache = scheduler, executor, cache
        self._depth = 2 if is_async else 1
        self._lock = threading.Lock()
        self._num_steps = self._num_tokens = self._num_generated_tokens = 0
        self._device_seconds = 0.0
        self._op_seconds: dict[str, float] = {}
        self._op_checks: dict[str, OpCheck] = {}
        self._drafts: DraftCounts | None = None
        self._has_ended = False  # a request was ended from outside and its end not handed out
        self._device = DeviceThread(executor)
        self.on_encoded: Callable[[], None] = lambda: None
        self._encoder = None
        if encoder is not None:
            self._encoder = DeviceThread(encoder, "deepinfer-encoder", lambda: self.on_encoded())
        self._num_encoded = 0
        self._encode_seconds = 0.0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it is refused."""
        with self._lock:
            self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request wherever it stands, aborted or because of a stop text; False for an unknown id."""
        with self._lock:
            is_known = self.scheduler.finish(request_id, reason)
            self._has_ended |= is_known
            return is_known

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        with self._lock:
            is_encoded = self._encoder is not None and self._encoder.has_result()
            return self._has_ended or is_encoded or self.scheduler.has_work()

    def step(self) -> StepOutput | None:
        """Plan and hand over the next step, then apply the oldest one that is due.

        Returns what requests got; None when no step was due yet.
        """
        self._encode()
        with self._lock:
            plan = self.scheduler.schedule()
        if plan is not None:
            self._num_steps += 1
            self._device.submit(plan)
            if self._device.num_in_flight < self._depth:
                return None
        result = self._device.result() if self._device.num_in_flight else None
        with self._lock:
            self._has_ended = False
            if result is not None:
                output = self.scheduler.update(result)
                self._num_tokens += result.num_computed
                self._num_generated_tokens += len(output.token_ids)
                self._device_seconds += result.seconds
                for kind, seconds in result.op_seconds.items():
                    self._op_seconds[kind] = self._op_seconds.get(kind, 0.0) + seconds
                self._op_checks, self._drafts = result.op_checks, result.drafts
                return output
            return StepOutput([], np.zeros(0, dtype=np.int32), finished=self.scheduler.take_finished())

    def _encode(self) -> None:
        """Take what the encoder has done, and hand over the next images."""
        if self._encoder is None:
            return
        result = self._encoder.result() if self._encoder.has_result() else None
        with self._lock:
            if result is not None:
                self.scheduler.update_images(result)
                self._num_encoded += len(result.keys)
                self._encode_seconds += result.seconds
            plan = self.scheduler.schedule_images()
        if plan is not None:
            self._encoder.submit(plan)

    def stats(self) -> EngineStats:
        """Counters as they stand now."""
        with self._lock:
            return EngineStats(
                num_steps=self._num_steps,
                num_tokens=self._num_tokens,
                num_generated_tokens=self._num_generated_tokens,
                device_seconds=self._device_seconds,
                op_seconds=dict(self._op_seconds),
                op_checks=self._op_checks,
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                num_preemptions=self.scheduler.num_preemptions,
                num_not_finite=self.scheduler.num_not_finite,
                num_encoded_images=self._num_encoded,
                encode_seconds=self._encode_seconds,
                block_tokens=self._cache.block_tokens,
                num_blocks=self._cache.num_blocks,
                num_free_blocks=self._cache.num_free_blocks,
                drafts=self._drafts,
            )

    def close(self) -> None:
        """Wait for the step that runs on the device, drop the one behind it, and stop the device thread."""
        self._device.close()
        if self._encoder is not None:
            self._encoder.close()
