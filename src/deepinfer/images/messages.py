"""Images on their way through the engine: flat arrays and ids, no torch.

ImageInput     frontend -> encoder      the pixels of one image
ImageSpan      frontend -> scheduler    where an image stands in a prompt
EncodePlan     scheduler -> encoder     which images to encode next
EncodeResult   encoder -> scheduler     that it is done
ImagePlace     scheduler -> runner      an image among the tokens of a step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImageInput:
    """One image as the encoder takes it.

    key: digest of the pixels and their size; images of one key have one embedding. Whatever is kept
        by content (embeddings, and any reuse of prompt positions) is told apart by it.
    pixels: [height, width, 3] uint8, sides are multiples of the patch size.
    """

    key: bytes
    pixels: Pixels
    num_tokens: int
    num_patches: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """An image at positions start .. end - 1 of a prompt."""

    start: int
    image: ImageInput

    @property
    def end(self) -> int:
        return self.start + self.image.num_tokens


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Images to encode, one after the other, once the embeddings of `drops` are dropped."""

    images: tuple[ImageInput, ...]
    drops: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """The embeddings of these keys are there. seconds: what it took."""

    keys: tuple[bytes, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """All positions of an image, which row `row` of a step computes from position `start` on."""

    row: int
    start: int
    num_tokens: int
    key: bytes
