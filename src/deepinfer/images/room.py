"""PixelRoom: the prepared pixels that requests hold, bounded in bytes; the same image is held once for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer.errors import QueueFullError, RequestError
from deepinfer.images.messages import ImageInput, ImageSpan


@dataclass(slots=True)
class _Held:
    image: ImageInput
    num_requests: int = 0


class PixelRoom:
    """Counts what the requests of one process hold, from when they come until they end.

    max_bytes: of the pixels of all their images, each counted once.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: dict[bytes, _Held] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all pixels that are held."""
        return self._num_bytes

    def check_room(self, images: Sequence[ImageSpan], name: str) -> None:
        """Raise RequestError if the images of a request can never be held, QueueFullError if not now.

        name: how errors call the request.
        """
        distinct, limit = _distinct(images), self._max_bytes
        check_fits(images, limit, name)
        if self._num_bytes + sum(image.pixels.nbytes for image in distinct if image.key not in self._held) > limit:
            raise QueueFullError(
                f"{name} is refused: images of other requests take {self._num_bytes} bytes already and "
                f"image_queue_bytes is {limit}; try again later or raise --image-queue-bytes"
            )

    def take(self, images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
        """Hold the images of one more request, which has passed `check_room`; returns them as they are held."""
        for image in _distinct(images):
            if image.key not in self._held:
                self._held[image.key] = _Held(image)
                self._num_bytes += image.pixels.nbytes
            self._held[image.key].num_requests += 1
        return tuple(ImageSpan(span.start, self._held[span.image.key].image) for span in images)

    def give(self, images: Sequence[ImageSpan]) -> None:
        """A request that took these images is no more."""
        for image in _distinct(images):
            held = self._held[image.key]
            held.num_requests -= 1
            if not held.num_requests:
                del self._held[image.key]
                self._num_bytes -= image.pixels.nbytes

    def check(self) -> None:
        """Assert that the sums agree; for tests and for the idle engine."""
        assert self._num_bytes == sum(held.image.pixels.nbytes for held in self._held.values()), "pixels are miscounted"
        assert self._num_bytes <= self._max_bytes, "more pixels than there is room for"
        assert all(held.num_requests > 0 for held in self._held.values()), "pixels are held for nobody"


def check_fits(images: Sequence[ImageSpan], max_bytes: int, name: str) -> None:
    """Raise RequestError if the images of a request can never be held. name: as in `PixelRoom.check_room`."""
    own = sum(image.pixels.nbytes for image in _distinct(images))
    if own > max_bytes:
        raise RequestError(
            f"{name}: the pixels of its images take {own} bytes, but image_queue_bytes is {max_bytes}; "
            "give fewer or smaller images or raise --image-queue-bytes"
        )


def _distinct(images: Sequence[ImageSpan]) -> Iterable[ImageInput]:
    return {span.image.key: span.image for span in images}.values()
