"""Which images are encoded when, and which embeddings stay: encoding is scheduled beside the steps.

A request with images waits here until all their embeddings are there, then in the scheduler's
queue like any other. Steps therefore never wait for the encoder, and requests that decode keep
their pace while it works.

Embeddings are counted here and lie on the device; `EncodePlan.drops` keeps both sides equal. Those of
a request are *held* from the moment that room is reserved for all of them until its prompt is
computed; others stay while there is room, and the least recently used make place. Room for a
request is reserved as a whole and in the order of the queue, so two requests never wait for each
other's half. An image fits in a step beside all decode rows, or else its request was refused, so the
oldest prompt always advances.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.messages import EncodePlan, EncodeResult, ImageInput, ImageSpan
from deepinfer.images.room import PixelRoom
from deepinfer.scheduler.queue import WaitingQueue
from deepinfer.scheduler.request import Request


@dataclass(slots=True)
class _Embedding:
    """Bytes of one embedding, by how many requests and planned steps it is held, whether it is encoded."""

    num_bytes: int
    num_holds: int = 0
    is_ready: bool = False


class ImageWork:
    """Requests that wait for embeddings, and the embeddings.

    max_queue: requests that may wait here; more are refused. bytes_per_token: of an embedding.
    """

    def __init__(self, options: ImageOptions, max_queue: int, bytes_per_token: int) -> None:
        self._options = options
        self._bytes_per_token = bytes_per_token
        self._line = WaitingQueue(max_queue)  # for room
        self._promised: dict[str, Request] = {}  # room is reserved, not all is encoded
        self._wanted: deque[ImageInput] = deque()  # to be encoded, in order
        self._in_flight: EncodePlan | None = None
        self._embeddings: OrderedDict[bytes, _Embedding] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._drops: list[bytes] = []  # for the next plan
        self._holds: dict[str, list[bytes]] = {}  # of each request
        self._releases: deque[tuple[int, list[bytes]]] = deque()  # when the result of that step has come
        self._steps_done = 0
        self._pixels = PixelRoom(options.image_queue_bytes)  # of all requests, wherever they stand

    # -- requests

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return len(self._line) + len(self._promised)

    @property
    def num_bytes(self) -> int:
        """Bytes of all embeddings, those that are being made included."""
        return self._num_bytes

    def has_work(self) -> bool:
        """Whether requests wait and no encoder works for them: then there is something to plan here."""
        return self.num_waiting > 0 and self._in_flight is None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._line or request_id in self._promised

    def add(self, request: Request) -> None:
        """Take in a new request. Raises RequestError if it can never run here, QueueFullError if not now."""
        distinct = {span.image.key: span.image for span in request.images}.values()
        name, limit = request.request_id, self._options.image_cache_bytes
        if (needed := sum(map(self._size, distinct))) > limit:
            raise RequestError(
                f"request {name!r}: the embeddings of its images take {needed} bytes, but there is room for {limit}; "
                "give fewer or smaller images or raise --image-cache-bytes"
            )
        self._pixels.check_room(request.images, f"request {name!r}")
        self._line.add(request)
        request.images = self._pixels.take(request.images)

    def put_back(self, request: Request, step: int) -> None:
        """A preempted request needs its embeddings again; `step` is the last one planned."""
        self.release(request, step)
        self._line.put_back(request)

    def end(self, request: Request, step: int) -> None:
        """The request is no more, wherever it stands; `step` is the last one planned."""
        self._line.remove(request.request_id)
        self._promised.pop(request.request_id, None)
        self.release(request, step)
        self._pixels.give(request.images)

    def release(self, request: Request, step: int) -> None:
        """The request does not need its embeddings after this step, the last one planned."""
        if keys := self._holds.pop(request.request_id, None):
            self._releases.append((step, keys))
            self.step_done(self._steps_done)

    def step_done(self, step: int) -> None:
        """The result of this step has come, which no later plan reads."""
        self._steps_done = step
        while self._releases and self._releases[0][0] <= step:
            for key in self._releases.popleft()[1]:
                self._embeddings[key].num_holds -= 1
                self._embeddings.move_to_end(key)

    # -- encoding

    def take_ready(self) -> list[Request]:
        """Requests whose embeddings are all there; room is reserved for those that come next."""
        while (request := self._line.first()) is not None and self._reserve(request):
            self._line.take_first()
            self._promised[request.request_id] = request
        ready = [request for request in self._promised.values() if self._is_ready(request)]
        for request in ready:
            del self._promised[request.request_id]
        return ready

    def plan(self) -> EncodePlan | None:
        """The next images to encode; None when there are none or some are being encoded."""
        if self._in_flight is not None:
            return None
        images: list[ImageInput] = []
        budget = self._options.max_encode_patches
        while (image := self._first_wanted()) is not None and (not images or image.num_patches <= budget):
            images.append(self._wanted.popleft())
            budget -= image.num_patches
        if not images:
            return None
        self._in_flight = EncodePlan(tuple(images), tuple(self._drops))
        self._drops.clear()
        return self._in_flight

    def update(self, result: EncodeResult) -> None:
        """The plan in flight is done."""
        assert self._in_flight is not None, "images were encoded that nobody planned"
        assert result.keys == tuple(image.key for image in self._in_flight.images), "other images were encoded"
        self._in_flight = None
        for key in result.keys:
            self._embeddings[key].is_ready = True

    def _first_wanted(self) -> ImageInput | None:
        """The next image to encode, left in the line; those that nobody waits for any more are forgotten."""
        while self._wanted:
            image = self._wanted[0]
            if self._embeddings[image.key].num_holds:
                return image
            self._wanted.popleft()
            self._num_bytes -= self._embeddings.pop(image.key).num_bytes
        return None

    def _reserve(self, request: Request) -> bool:
        """Hold all embeddings of a request, making room for those that are not there; False if there is none."""
        distinct = {span.image.key: span.image for span in request.images}
        missing = [image for key, image in distinct.items() if key not in self._embeddings]
        if not self._make_room(sum(map(self._size, missing)), distinct.keys()):
            return False
        for image in missing:
            self._embeddings[image.key] = _Embedding(self._size(image))
            self._num_bytes += self._size(image)
        self._wanted.extend(missing)
        for key in distinct:
            self._embeddings[key].num_holds += 1
            self._embeddings.move_to_end(key)
        self._holds[request.request_id] = list(distinct)
        return True

    def _make_room(self, num_bytes: int, keep: Iterable[bytes]) -> bool:
        """Drop what nobody holds, least recently used first, if that makes room for so many bytes."""
        excess = self._num_bytes + num_bytes - self._options.image_cache_bytes
        kept, drops = set(keep), []
        for key, embedding in self._embeddings.items():
            if excess <= 0:
                break
            if embedding.is_ready and not embedding.num_holds and key not in kept:
                drops.append(key)
                excess -= embedding.num_bytes
        if excess > 0:
            return False
        for key in drops:
            self._num_bytes -= self._embeddings.pop(key).num_bytes
        self._drops += drops
        return True

    def _is_ready(self, request: Request) -> bool:
        return all(self._embeddings[span.image.key].is_ready for span in request.images)

    def _size(self, image: ImageInput) -> int:
        return image.num_tokens * self._bytes_per_token

    def check(self) -> None:
        """Assert that sums and holds agree; for tests and for the idle engine."""
        assert self._num_bytes == sum(embedding.num_bytes for embedding in self._embeddings.values())
        assert self._num_bytes <= self._options.image_cache_bytes, "more embeddings than there is room for"
        self._pixels.check()
        holds = [key for keys in self._holds.values() for key in keys]
        holds += [key for _, keys in self._releases for key in keys]
        for key, embedding in self._embeddings.items():
            assert embedding.num_holds == holds.count(key), "an embedding is held by nobody"


def chunk_end(images: Iterable[ImageSpan], start: int, end: int) -> int:
    """Where a prefill chunk that would be start .. end - 1 has to end so that it cuts no image.

    Before the first image that it would cut, or behind it if the chunk begins with it.
    """
    for span in images:
        if span.start < end < span.end:
            return span.end if span.start == start else span.start
    return end
