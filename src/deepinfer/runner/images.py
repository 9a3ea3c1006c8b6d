"""ImageEncoder: encodes images beside the steps and puts their rows among a step's tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer.images.messages import EncodePlan, EncodeResult, ImageInput
from deepinfer.messages import StepPlan
from deepinfer.ops.batch import ForwardBatch
from deepinfer.ops.transfer import to_device


class Tower(Protocol):
    """The image encoder of a model, of whatever version."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Rows [positions, hidden] float32 of an image [height, width, 3] uint8."""
        ...


class ImageEncoder:
    """Keeps the embeddings that the scheduler counts; which of them are dropped, and when, is its decision.

    `execute` runs in the encoder's thread, on a CUDA device on a stream of its own; `place` in the device
    thread, and only for images whose `EncodeResult` the scheduler has seen.
    """

    def __init__(self, tower: Tower, device: torch.device) -> None:
        self._tower, self._device = tower, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._embeddings: dict[bytes, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all embeddings."""
        return sum(rows.nbytes for rows in list(self._embeddings.values()))  # the encoder's thread may add one

    def execute(self, plan: EncodePlan) -> EncodeResult:
        """Drop and encode; returns when the embeddings are there."""
        started = time.monotonic()
        for key in plan.drops:
            del self._embeddings[key]
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            for image in plan.images:
                self._embeddings[image.key] = self._encode(image)
        if self._stream is not None:
            self._stream.synchronize()
        return EncodeResult(tuple(image.key for image in plan.images), time.monotonic() - started)

    def place(self, plan: StepPlan, batch: ForwardBatch) -> ForwardBatch:
        """The batch of a plan with the rows of its images."""
        is_image = np.zeros(plan.num_tokens, dtype=np.bool_)
        offsets = np.cumsum(plan.counts) - plan.counts
        rows = []
        for place in plan.images:  # in order of the tokens
            first = int(offsets[place.row]) + place.start - int(plan.starts[place.row])
            is_image[first : first + place.num_tokens] = True
            rows.append(self._embeddings[place.key])
        if self._stream is not None:
            for embedding in rows:
                embedding.record_stream(torch.cuda.current_stream(self._device))
        flags = to_device(is_image, self._device)
        return dataclasses.replace(batch, is_image=flags, image_rows=torch.cat(rows))

    def _encode(self, image: ImageInput) -> Tensor:
        rows = self._tower.encode(to_device(image.pixels, self._device))
        assert rows.shape[0] == image.num_tokens, f"{rows.shape[0]} rows for an image of {image.num_tokens} positions"
        return rows
