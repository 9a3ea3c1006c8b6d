"""EngineClient: the door to an engine core that runs in a thread of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from queue import Empty, SimpleQueue
from types import TracebackType

import numpy as np

from deepinfer import log
from deepinfer.engine.core import EngineCore
from deepinfer.engine.grammar_queue import GrammarQueue
from deepinfer.engine.stats import EngineStats
from deepinfer.errors import EngineDeadError, QueueFullError, RequestError
from deepinfer.messages import FinishReason, GenerateRequest, StepOutput
from deepinfer.structured.server import GrammarServer

logger = log.get(__name__)


class Subscription:
    """The requests of one caller, and the outputs of every step that touched one of them.

    An output may also hold lines of other callers' requests; the reader skips those.
    """

    def __init__(self, client: EngineClient):
        self._client = client
        self.outputs: SimpleQueue[StepOutput | BaseException] = SimpleQueue()

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it is refused, EngineDeadError after a crash."""
        self._client._submit(request, self)

    def deliver(self, output: StepOutput | BaseException) -> None:
        """Called by the engine's thread, under the client's lock."""
        self.outputs.put(output)

    def get(self, timeout: float | None = None) -> StepOutput:
        """The next output; raises queue.Empty after `timeout` seconds, EngineDeadError after a crash."""
        output = self.outputs.get(timeout=timeout)
        if isinstance(output, BaseException):
            self.outputs.put(output)  # every later call fails too
            raise EngineDeadError(f"the engine stopped: {output!r}") from output
        return output


class EngineClient:
    """Runs an EngineCore in a daemon thread and passes its outputs on, one message a step and caller.

    max_queue: requests that may wait for their grammars; the core limits those that wait for it.

    Lock order: `_wake`, then the core's own lock. Whatever the garbage collector may call, in any
    thread and thus inside any lock, takes neither: `is_routed`, `abandon`.
    """

    def __init__(self, core: EngineCore, grammars: GrammarServer | None = None, *, max_queue: int):
        self.core = core
        self._grammars = GrammarQueue(grammars, self._notify, max_queue)
        self._routes: dict[str, Subscription] = {}  # of every request whose end was not handed out
        self._abandoned: SimpleQueue[tuple[str, Subscription]] = SimpleQueue()
        self._wake = threading.Condition()
        core.on_encoded = self._notify
        self.num_turns = 0  # of the loop around the core; stands still while a step or an image takes its time
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deepinfer-core", daemon=True)
        self._thread.start()

    def subscribe(self) -> Subscription:
        """A new caller."""
        return Subscription(self)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; its Finished arrives as usual. False for an unknown id."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason that the caller found; False for an unknown id."""
        with self._wake:
            is_known = self._grammars.finish(request_id, reason) or self.core.finish(request_id, reason)
            self._wake.notify()
        return is_known

    @property
    def num_requests(self) -> int:
        """Whose end was not handed out yet."""
        return len(self._routes)

    def is_routed(self, request_id: str) -> bool:
        """Whether outputs of this request are still to come."""
        return request_id in self._routes

    def abandon(self, request_id: str, subscription: Subscription) -> None:
        """End a request before the next step is planned, if the subscription has one of that id.

        While such a request exists the core is at work, so nobody has to be woken.
        """
        self._abandoned.put((request_id, subscription))

    def stats(self) -> EngineStats:
        """Counters of the engine as they stand now."""
        return self.core.stats()

    def close(self) -> None:
        """Stop after the step in flight. Requests that still run are reported as a dead engine."""
        self._stop()
        self._thread.join()

    def close_unused(self) -> None:
        """`close` for a garbage collector or at exit: waits only where it can block nobody."""
        self._stop()
        if threading.current_thread() is threading.main_thread():
            self._thread.join()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, request: GenerateRequest, subscription: Subscription) -> None:
        with self._wake:
            if self._is_closed:
                cause = repr(self._failure) if self._failure else "it was closed"
                raise EngineDeadError(f"request {request.request_id!r} cannot run: the engine stopped ({cause})")
            if request.request_id in self._routes:
                raise RequestError(f"request id {request.request_id!r} is in use; give another one")
            self._routes[request.request_id] = subscription  # first: an interrupted caller can still abandon it
            self._wake.notify()
            try:
                if request.params.constraint is None:
                    self.core.add(request)
                else:
                    self._grammars.add(request)
            except RequestError:
                del self._routes[request.request_id]
                raise

    def _stop(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.num_turns += 1
                self._end_abandoned()
                self._admit_ready()
                output = self.core.step()
                if output is not None:
                    self._deliver(output)
            failure: BaseException = EngineDeadError("it was closed")
        except BaseException as error:
            logger.exception("the engine core failed")
            failure = self._failure = error
        with self._wake:
            self._is_closed = True
            subscriptions = set(self._routes.values())
            self._routes.clear()
        for subscription in subscriptions:
            subscription.deliver(failure)
        self.core.close()
        self._grammars.close()

    def _end_abandoned(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                request_id, subscription = self._abandoned.get_nowait()
                if self._routes.get(request_id) is subscription:  # else it has ended, and the id may be another's
                    self.finish(request_id, "abort")

    def _admit_ready(self) -> None:
        """Requests whose grammar is ready go to the scheduler, unless its queue is full."""
        if not self._grammars.has_work():
            return
        with self._wake:
            for request in self._grammars.ready():
                try:
                    self.core.add(request)
                except QueueFullError:
                    break
                except RequestError as error:
                    self._grammars.finish(request.request_id, "error", str(error))
                else:
                    self._grammars.remove(request.request_id)
            finished = self._grammars.take_finished()
        if finished:
            self._deliver(StepOutput([], np.zeros(0, dtype=np.int32), finished=finished))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not self._is_closed and not self.core.has_work() and not self._grammars.has_work():
                self._wake.wait()
            return not self._is_closed

    def _deliver(self, output: StepOutput) -> None:
        owned, plain = [*output.prompt_logits, *output.prompt_logprobs], output
        if owned:  # what belongs to prompts is large: only its owner shall keep it
            plain = dataclasses.replace(output, prompt_logits=[], prompt_logprobs=[])
        with self._wake:
            owners = {self._routes.get(request_id) for request_id, _, _ in owned}
            touched = {self._routes.get(request_id) for request_id in output.request_ids}
            touched |= {self._routes.get(ended.request_id) for ended in output.finished}
            for ended in output.finished:  # first: whoever reads an end finds no route any more
                self._routes.pop(ended.request_id, None)
            for subscription in touched | owners:
                if subscription is not None:
                    subscription.deliver(output if subscription in owners else plain)
