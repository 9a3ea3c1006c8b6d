"""Whole answers to many prompts at once, in the order of the prompts."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from deepinfer.call import Call
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.stream import RequestStream
from deepinfer.sampling.params import SamplingParams

# From an item, its parameters and the request ids of its answers to a stream for each of them.
Start = Callable[[Any, SamplingParams, list[str]], Sequence[RequestStream]]
QUEUE_POLL_SECONDS = 0.005


class Answers:
    """Answers items through one call; items wait here while the engine's queue is full.

    A refused item has an output that says so, and the others go on.
    """

    def __init__(self, call: Call, start: Start, items: Sequence[Any], params: Sequence[SamplingParams]) -> None:
        """items: prompts or conversations. params: one for each item."""
        self._call, self._start, self._items, self._params = call, start, items, params
        self._running: dict[str, tuple[int, RequestStream]] = {}  # request id -> number of the item, its stream
        self._outputs: list[dict[int, RequestOutput]] = [{} for _ in items]  # of each item, by sample
        self._num_outputs = 0

    def collect(self, progress: bool | None) -> list[RequestOutput]:
        """One output per item, in order. progress: a bar; None = when standard error is a terminal."""
        total = sum(one.n for one in self._params)
        has_bar = sys.stderr.isatty() and total > 1 if progress is None else progress
        with tqdm(total=total, disable=not has_bar, unit="answer") as bar:
            ready = self._streams()
            entry = next(ready, None)
            while entry is not None or self._running:
                while entry is not None and self._submit(*entry):
                    entry = next(ready, None)
                if self._running:
                    for ended in self._call.wait().finished:
                        if ended.request_id in self._running:
                            index, stream = self._running.pop(ended.request_id)
                            self._put(index, stream.sample, stream.output())
                elif entry is not None:  # the queue is full of other callers' requests
                    time.sleep(QUEUE_POLL_SECONDS)
                bar.update(self._num_outputs - bar.n)
        return [_together(outputs) for outputs in self._outputs]

    def _streams(self) -> Iterator[tuple[int, RequestStream]]:
        """The answers to be submitted, each made when it is asked for."""
        for index, (item, params) in enumerate(zip(self._items, self._params, strict=True)):
            request_ids = self._call.take_ids(params.n)
            try:
                streams = self._start(item, params, request_ids)
            except RequestError as error:
                self._put(index, 0, RequestOutput.refused(request_ids[0], str(error)))
            else:
                for stream in streams:
                    yield index, stream

    def _submit(self, index: int, stream: RequestStream) -> bool:
        """Move a stream into the engine, or its refusal to the outputs; False when the queue is full."""
        request_id = stream.request.request_id
        try:
            self._call.submit(stream)
            self._running[request_id] = index, stream
        except QueueFullError:
            return False
        except RequestError as error:
            self._put(index, stream.sample, RequestOutput.refused(request_id, str(error)))
        return True

    def _put(self, index: int, sample: int, output: RequestOutput) -> None:
        self._outputs[index][sample] = output
        self._num_outputs += 1


def _together(outputs: dict[int, RequestOutput]) -> RequestOutput:
    """The first answer of an item with the others in it."""
    more = [outputs[sample] for sample in sorted(outputs) if sample > 0]
    return dataclasses.replace(outputs[0], more=more) if more else outputs[0]
