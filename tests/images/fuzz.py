"""Files of all kinds, and what chance makes of them."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from .pictures import encoded, picture

NUMBERS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x00\x00\xff\xff")


def files() -> list[bytes]:
    """Small files of every kind that is taken."""
    image, other = picture(90, 70, seed=1), picture(90, 70, seed=2)
    grey = np.random.default_rng(3).integers(0, 65536, (70, 90), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        encoded(image, "PNG"),
        encoded(image.convert("RGBA"), "PNG"),
        encoded(image.convert("P"), "PNG", transparency=3),
        encoded(Image.fromarray(grey), "PNG"),
        encoded(image, "JPEG", exif=exif),
        encoded(image, "JPEG", progressive=True),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "WEBP"),
        encoded(image, "WEBP", lossless=True),
        encoded(image, "WEBP", save_all=True, append_images=[other]),
        encoded(image, "GIF"),
        encoded(image, "GIF", save_all=True, append_images=[other]),
    ]


def mutated(file: bytes, draw: random.Random) -> bytes:
    """A file with up to twenty changes: bytes set, cut off, put in, left out, repeated, numbers made extreme."""
    data = bytearray(file)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        size = len(data)
        at = draw.randrange(min(size, draw.choice((64, size))))  # headers often
        kind = draw.choices(("set", "cut", "put", "leave", "number", "repeat"), (5, 1, 1, 1, 1, 1))[0]
        if kind == "set":
            data[at] = draw.randrange(256)
        elif kind == "cut":
            del data[at + 1 :]
        elif kind == "put":
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == "leave" and size > 16:
            del data[at : at + draw.randrange(1, 9)]
        elif kind == "number":
            data[at : at + 4] = draw.choice(NUMBERS)
        else:
            data[at:at] = data[max(0, at - 50) : at]
    return bytes(data)
