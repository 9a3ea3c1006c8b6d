"""The null engine with an encoder that takes its time, and requests with images."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from deepinfer.backends.null.images import NullEncoder
from deepinfer.config.engine import ImageOptions
from deepinfer.images.messages import EncodePlan, ImageInput, ImageSpan
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.images import ImageWork
from null_engine import Answer, NullEngine

IMAGE_TOKEN = 9


def image(number: int, num_tokens: int = 3, num_bytes: int = 12) -> ImageInput:
    """An image of its own for each number and size."""
    pixels = np.full((num_bytes // 3, 1, 3), number, dtype=np.uint8)
    return ImageInput(bytes([number, num_tokens]), pixels, num_tokens, num_patches=num_tokens)


def request(name: str, parts: list[int | ImageInput], max_tokens: int = 4, **fields: Any) -> GenerateRequest:
    """A request whose prompt is tokens and images in this order."""
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, ImageInput):
            spans.append(ImageSpan(len(ids), part))
            ids += [IMAGE_TOKEN] * part.num_tokens
        else:
            ids.append(part)
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return GenerateRequest(name, np.array(ids, np.int32), params, 0.0, images=tuple(spans), **fields)


class ImageEngine(NullEngine):
    """`encode` makes progress on images: plans some, or finishes the plan in flight."""

    def __init__(
        self,
        *,
        max_queue: int = 100,
        cache_tokens: int = 100,
        patches: int = 100,
        queue_bytes: int = 2**20,
        **options: Any,
    ) -> None:
        limits = ImageOptions(image_cache_bytes=cache_tokens, max_encode_patches=patches, image_queue_bytes=queue_bytes)
        self.images = ImageWork(limits, max_queue, bytes_per_token=1)
        super().__init__(max_queue=max_queue, images=self.images, **options)
        self.encoder = NullEncoder()
        self.runner._encoder = self.encoder
        self.encoding: EncodePlan | None = None
        self.encoded: list[list[bytes]] = []  # keys of each plan
        self.cache_tokens = cache_tokens

    def send(self, asked: GenerateRequest) -> None:
        self.scheduler.add(asked)
        self.answers[asked.request_id] = Answer(asked)
        self.scheduler.check()

    def encode(self) -> None:
        if self.encoding is not None:
            self.scheduler.update_images(self.encoder.execute(self.encoding))
            self.encoding = None
        self.encoding = self.scheduler.schedule_images()
        if self.encoding is not None:
            self.encoded.append([item.key for item in self.encoding.images])
        assert self.encoder.num_tokens <= self.cache_tokens  # drops that are planned next may still be there
        self.scheduler.check()

    def run_all(self, draw: random.Random | None = None, max_rounds: int = 3000) -> None:
        """Until everything ended; with `draw` the encoder takes a random time."""
        for _ in range(max_rounds):
            if self.encoding is None or draw is None or draw.random() < 0.3:
                self.encode()
            self.step()
            if not self.scheduler.has_work() and self.encoding is None:
                return
        raise AssertionError("still at work")
