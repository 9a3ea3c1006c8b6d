"""What the server holds of requests that are in the engine: nothing is sent that it has no room for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.engine.stats import EngineStats
from deepinfer.engine.wire import Command, Ready, Refused, Steps, Submit
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.frontend.known_answers import KnownAnswers
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer
from deepinfer.images.messages import ImageInput, ImageSpan
from deepinfer.images.room import PixelRoom
from deepinfer.messages import Finished, GenerateRequest, RequestTimes, StepOutput
from deepinfer.sampling.params import SamplingParams
from deepinfer.serve.link import Link
from deepinfer.serve.metrics import Metrics

STATS = EngineStats(0, 0, 0, 0.0, {}, {}, 0, 0, 0, 0, 0, 0.0, 1, 64, 64)


class Bench:
    """A link to an engine that only takes notes."""

    def __init__(self, max_bytes: int = 24) -> None:
        self.sent: list[Command] = []
        self.room = PixelRoom(max_bytes)
        known = KnownAnswers(NoTokenizer(), lambda is_thinking: pytest.fail("no answer is read"))
        self.link = Link(Metrics("m"), known, 8, self.room)
        self.link.attach(Ready(64, 64, 64, None, STATS), self.sent.append)

    def open(self, *numbers: int, count: int = 1) -> Any:
        images = tuple(ImageSpan(place, image(number)) for place, number in enumerate(numbers))
        ids, params = np.zeros(9, np.int32), SamplingParams(max_tokens=4)
        requests = [GenerateRequest(name, ids, params, 0.0, images=images) for name in self.link.new_ids(count)]
        return self.link.open([RequestStream(request, NoTokenizer()) for request in requests])


def image(number: int) -> ImageInput:
    return ImageInput(bytes([number]), np.full((4, 1, 3), number, dtype=np.uint8), 1, 1)


def test_pixels_of_requests_in_the_engine_are_bounded() -> None:
    bench = Bench()
    first = bench.open(1, 2, count=3)
    assert bench.room.num_bytes == 24 and len(bench.sent) == 3
    bench.open(2).close()  # the same image
    with pytest.raises(QueueFullError, match="the request is refused: images of other requests take 24 bytes"):
        bench.open(3)
    with pytest.raises(RequestError, match="the pixels of its images take 36 bytes, but image_queue_bytes is 24"):
        bench.open(1, 2, 3)
    assert sum(isinstance(command, Submit) for command in bench.sent) == 4 and bench.link.num_requests == 3
    first.close()
    assert bench.room.num_bytes == 0
    bench.open(3)


def test_pixels_are_given_back_however_a_request_ends() -> None:
    bench = Bench()
    ended = Finished("request-1", "length", RequestTimes(0.0, 0.0, 0.0, 1.0))
    bench.open(1)
    bench.link.take(Steps([StepOutput([], np.zeros(0, np.int32), finished=[ended])], STATS))
    assert bench.room.num_bytes == 0
    bench.open(1)
    bench.link.take(Refused("request-2", "no", is_queue_full=False))
    assert bench.room.num_bytes == 0
    bench.open(1, 2)
    bench.link.detach("gone")
    assert bench.room.num_bytes == 0
    bench.room.check()
