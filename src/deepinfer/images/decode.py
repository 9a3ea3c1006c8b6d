"""The bytes of an image file to RGB pixels, checked before anything large is allocated.

Only the formats that chat services take are opened, without what does not belong to the picture
(`containers.py`). What is not a plain 8-bit RGB picture becomes one: EXIF rotation is applied,
transparency shows `BACKGROUND`, 16-bit samples keep their high byte, and of an animation the first
frame counts.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.containers import read_container

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BACKGROUND = (253, 253, 253)  # that of deepseek-recipe
MAX_SIDE = 8192  # pixels, as in deepseek-recipe
MAX_SCANS = 32  # of a JPEG file; each costs a pass over all pixels, and files in use have about ten
DAMAGED = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error,
)  # fmt: skip
TURNS = (
    None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90,
)  # fmt: skip


@dataclass(frozen=True)
class ImageLimits:
    """What one image may be at most: bytes of its file, and pixels."""

    max_bytes: int
    max_pixels: int

    @classmethod
    def of(cls, options: ImageOptions) -> ImageLimits:
        """The limits of an engine."""
        return cls(options.max_image_bytes, options.max_image_pixels)


def decode(data: bytes, name: str, limits: ImageLimits) -> Image.Image:
    """An RGB image from the bytes of a file.

    name: how errors call it. Raises RequestError for a file that is too large, of another kind or damaged.
    """
    check_bytes(len(data), name, limits)
    try:
        container = read_container(data)
        if container is None:
            raise RequestError(f"{name} is no image in one of the formats {', '.join(FORMATS)}; convert it")
        for size in container.sizes:
            check_size(size, name, limits)
        if container.open is JpegImageFile and container.data.count(b"\xff\xda") > MAX_SCANS:
            raise RequestError(f"{name} is a JPEG file of more than {MAX_SCANS} scans; save it again")
        with container.open(io.BytesIO(container.data)) as image:
            check_size(image.size, name, limits)
            image.load()
            return upright(to_rgb(image), container.orientation)
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RequestError(f"{name} has more than {limits.max_pixels} pixels; make it smaller") from None
    except MemoryError:
        raise RequestError(f"{name} does not fit into memory; make it smaller") from None
    except DAMAGED as error:
        raise RequestError(f"{name} is damaged or cut off ({str(error)[:120]}); save it again") from None


def check_bytes(num_bytes: int, name: str, limits: ImageLimits) -> None:
    """Raise RequestError for a file that is empty or too large."""
    if num_bytes == 0:
        raise RequestError(f"{name} is empty; give the bytes of an image file")
    if num_bytes > limits.max_bytes:
        raise RequestError(
            f"{name} has {num_bytes} bytes; an image may have {limits.max_bytes}, "
            "make it smaller or raise --max-image-bytes"
        )


def check_size(size: tuple[int, int], name: str, limits: ImageLimits) -> None:
    """Raise RequestError for a width, height or number of pixels that is too large."""
    width, height = size
    if min(width, height) < 1 or max(width, height) > MAX_SIDE:
        raise RequestError(f"{name} is {width} x {height} pixels; each side must be 1 to {MAX_SIDE}, scale it")
    if width * height > limits.max_pixels:
        raise RequestError(
            f"{name} is {width} x {height} = {width * height} pixels; an image may have {limits.max_pixels}, "
            "make it smaller or raise --max-image-pixels"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """A decoded image of any mode as 8-bit RGB."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):  # no file of ours, but pictures that callers made
        return Image.fromarray(np.asarray(image).clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer, opaque = image.convert("RGBA"), Image.new("RGB", image.size, BACKGROUND)
    opaque.paste(layer, mask=layer.getchannel("A"))
    return opaque


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turned by an orientation of EXIF, 1 to 8."""
    turn = TURNS[orientation - 1]
    return image if turn is None else image.transpose(turn)
