"""ImagePreparer: from the bytes of an image file to the pixels that the encoder takes."""

from __future__ import annotations

import hashlib
import threading
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError, shown
from deepinfer.images.decode import ImageLimits, decode
from deepinfer.images.geometry import ImageGeometry
from deepinfer.images.messages import ImageInput
from deepinfer.images.sources import ImageSource, image_bytes, opened_picture

Detail = Literal["low", "high", "original", "auto"]
DETAILS = ("low", "high", "original", "auto")
PADDING = (127, 127, 127)  # zero after normalisation
LOW_DETAIL_SIDE = 512  # pixels of the longer side at low detail, before the plan; as in deepseek-recipe
MAX_TURNS = 2  # prompts whose images are prepared at the same time, one after another, which bounds memory
KEY_BYTES = 16


class ImagePreparer:
    """Prepares images for one model; may be called from any thread.

    turns: hold one while the images of a prompt are prepared. max_bytes: of the pixels of one prompt.
    """

    def __init__(self, geometry: ImageGeometry, options: ImageOptions) -> None:
        self.geometry = geometry
        self.max_images = options.max_images
        self.limits = ImageLimits.of(options)
        self.max_bytes = options.image_queue_bytes
        self.turns = threading.BoundedSemaphore(MAX_TURNS)
        self._alive: WeakValueDictionary[bytes, ImageInput] = WeakValueDictionary()
        self._lock = threading.Lock()  # of `_alive`

    def prepare(self, source: ImageSource, name: str, detail: Detail = "high", size: object = None) -> ImageInput:
        """Decode, scale and pad one image; what is the same as one that is still in use is that one.

        name: how errors call it. detail: "low" scales the longer side down to `LOW_DETAIL_SIDE` first; the
        others are one. size: (width, height) that the file must have; None = any.

        Raises RequestError for an image that cannot be used.
        """
        if detail not in DETAILS:
            raise RequestError(f"detail of {name} is {shown(detail)}; it must be one of {', '.join(DETAILS)}")
        given = source if isinstance(source, Image.Image) else image_bytes(source, name, self.limits)
        if isinstance(given, Image.Image):
            picture = opened_picture(given, name, self.limits)
        else:
            picture = decode(given, name, self.limits)
        if size is not None:
            _check_size(picture, size, name)
        if detail == "low":
            picture = _at_low_detail(picture)
        pixels = np.array(fit(picture, self.geometry))
        height, width = pixels.shape[:2]
        digest = hashlib.blake2b(f"{width}x{height}".encode(), digest_size=KEY_BYTES)
        digest.update(pixels.data)
        tokens, patches = self.geometry.num_tokens(width, height), self.geometry.num_patches(width, height)
        image = ImageInput(digest.digest(), pixels, tokens, patches)
        with self._lock:
            return self._alive.setdefault(image.key, image)


def fit(image: Image.Image, geometry: ImageGeometry) -> Image.Image:
    """An RGB image at its planned size: scaled (bicubic) in its proportions and centred on `PADDING`.

    An image that is too wide for the model is squeezed instead.
    """
    width, height = geometry.plan(*image.size)
    aspect = geometry.max_aspect
    if aspect is not None and image.width >= aspect * image.height:
        return image.resize((width, height), Image.Resampling.BICUBIC)
    inner = _inside(image.size, (width, height))
    scaled = image.resize(inner, Image.Resampling.BICUBIC)
    if inner == (width, height):
        return scaled
    padded = Image.new("RGB", (width, height), PADDING)
    padded.paste(scaled, (round((width - inner[0]) * 0.5), round((height - inner[1]) * 0.5)))
    return padded


def _inside(size: tuple[int, int], frame: tuple[int, int]) -> tuple[int, int]:
    """The largest size of these proportions inside a frame, at least one pixel wide and high."""
    (width, height), (frame_width, frame_height) = size, frame
    if width / height > frame_width / frame_height:
        return frame_width, max(1, round(height / width * frame_width))
    return max(1, round(width / height * frame_height)), frame_height


def _at_low_detail(image: Image.Image) -> Image.Image:
    scale = LOW_DETAIL_SIDE / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _check_size(image: Image.Image, size: object, name: str) -> None:
    try:
        fits = tuple(map(int, size)) == image.size  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise RequestError(f"size of {name} is {shown(size)}; it must be (width, height) in pixels") from None
    if not fits:
        raise RequestError(f"{name} is {image.width} x {image.height} pixels, but its size is given as {shown(size)}")
