"""A thousand damaged files: a picture or a refusal, soon, and no more memory than a sound file takes."""

from __future__ import annotations

import random
import resource
import time

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.prepare import ImagePreparer

from .fuzz import files, mutated
from .pictures import geometry

NUM_FILES = 1000
MAX_SECONDS, MAX_GROWTH_KIB = 2.0, 200 << 10


def test_damaged_files_are_pictures_or_refused() -> None:
    draw, sound = random.Random(7), files()
    preparer = ImagePreparer(geometry("nano"), ImageOptions(max_image_pixels=2**22))
    for file in sound:
        preparer.prepare(file, "sound")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, num_taken = 0.0, 0
    for number in range(NUM_FILES):
        file = mutated(draw.choice(sound), draw)
        started = time.thread_time()
        try:
            num_taken += preparer.prepare(file, f"file {number}").num_tokens > 0
        except RequestError as error:
            assert str(error).startswith(f"file {number} ")
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < MAX_SECONDS
    assert NUM_FILES / 10 < num_taken < NUM_FILES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
