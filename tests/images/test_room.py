"""Pixels that requests hold: each image once, and no more than there is room for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.errors import QueueFullError, RequestError
from deepinfer.images.messages import ImageInput, ImageSpan
from deepinfer.images.room import PixelRoom


def image(number: int, num_bytes: int = 12) -> ImageInput:
    return ImageInput(bytes([number]), np.full((num_bytes // 3, 1, 3), number, dtype=np.uint8), 1, 1)


def spans(*images: ImageInput) -> tuple[ImageSpan, ...]:
    return tuple(ImageSpan(place, one) for place, one in enumerate(images))


def test_equal_images_are_held_once_and_given_back_with_the_last_request() -> None:
    room = PixelRoom(100)
    mine = room.take(spans(image(1), image(1), image(2)))
    assert [(span.start, span.image.key) for span in mine] == [(0, b"\1"), (1, b"\1"), (2, b"\2")]
    other = room.take(spans(image(1)))
    assert mine[0].image is mine[1].image is other[0].image and room.num_bytes == 24
    room.give(mine)
    assert room.num_bytes == 12
    room.give(other)
    assert room.num_bytes == 0


def test_what_never_fits_is_told_from_what_does_not_fit_now() -> None:
    room = PixelRoom(30)
    with pytest.raises(RequestError, match="^it: the pixels of its images take 36 bytes, but image_queue_bytes is 30"):
        room.check_room(spans(image(1), image(2), image(3)), "it")
    held = room.take(spans(image(1), image(2)))
    room.check_room(spans(image(2), image(2)), "it")
    with pytest.raises(QueueFullError, match="^it is refused: images of other requests take 24 bytes already"):
        room.check_room(spans(image(3)), "it")
    room.give(held)
    room.check_room(spans(image(3)), "it")


def test_random_requests_come_and_go() -> None:
    draw, room, held, num_refused = random.Random(4), PixelRoom(60), [], 0
    for _ in range(2000):
        if held and draw.random() < 0.45:
            room.give(held.pop(draw.randrange(len(held))))
        else:
            asked = spans(*(image(draw.randrange(8)) for _ in range(draw.randint(1, 4))))
            try:
                room.check_room(asked, "it")
                held.append(room.take(asked))
            except QueueFullError:
                num_refused += 1
        room.check()
        assert room.num_bytes == 12 * len({span.image.key for one in held for span in one})
    assert num_refused > 100
