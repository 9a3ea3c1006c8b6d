"""What of an image file is the picture: its first frame's pixels, the size, and how it is turned.

Files of all formats may hold texts, colour profiles, comments and other pictures in any number, for which
a decoder spends time and memory that the size of the picture does not bound (small files took minutes).
Here the parts are walked once, few at most, and the decoder gets only those that say what the pixels are.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

MAX_PARTS = 20_000  # chunks, segments or blocks; encoders that write the smallest ones make 2,500 of 20 MiB
MAX_TABLE_BYTES = 2**18  # of a JPEG file's head without metadata; all tables together take 12 KiB, a thumbnail 64
ORIENTATION = 0x0112  # the tag in EXIF data
PNG_PARTS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
# Frames, tables, restarts; JFIF and Adobe's segment, which say what the colours are.
JPEG_PARTS = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDC, 0xDD, 0xE0, 0xEE})
JPEG_ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xDA)})  # markers without a length

Size = tuple[int, int]  # width, height


class DamagedError(ValueError):
    """The file is not built as its format says."""


@dataclass(frozen=True)
class Container:
    """A file without what does not belong to its picture.

    sizes: every width and height that the decoder may make room for, where they are known before it runs.
    orientation: of EXIF, 1 to 8; 1 = upright.
    """

    data: bytes
    open: Callable[[io.BytesIO], Image.Image]
    sizes: tuple[Size, ...] = ()
    orientation: int = 1


def read_container(data: bytes) -> Container | None:
    """None for another format. Raises DamagedError, or struct.error where a part is cut off."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    return None


def orientation(exif: bytes) -> int:
    """How EXIF data say that the picture is turned; 1 where they are damaged or do not say it."""
    body = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(body[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "L", body, 4)
        (count,) = struct.unpack_from(order + "H", body, start)
        for entry in range(count):
            tag, _, _, value = struct.unpack_from(order + "HHLH", body, start + 2 + 12 * entry)
            if tag == ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


class _Parts:
    """Counts the parts of a file."""

    def __init__(self) -> None:
        self._left = MAX_PARTS

    def next(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise DamagedError(f"it has more than {MAX_PARTS} parts")


def _png(data: bytes) -> Container:
    parts, kept, exif, at = _Parts(), [data[:8]], b"", 8
    while at < len(data):
        parts.next()
        (length,) = struct.unpack_from(">L", data, at)
        name, end = data[at + 4 : at + 8], at + length + 12
        if name in PNG_PARTS:
            kept.append(data[at:end])
        elif name == b"eXIf":
            exif = exif or data[at + 8 : end - 4]
        at = end
        if name == b"IEND":
            break
    size = struct.unpack_from(">LL", data, 16)
    return Container(b"".join(kept), PngImageFile, (size,), orientation(exif))


def _jpeg(data: bytes) -> Container:
    parts, kept, sizes, exif, at, room = _Parts(), [data[:2]], list[Size](), b"", 2, MAX_TABLE_BYTES
    while True:
        at = _marker(data, at)
        marker = data[at + 1]
        if marker == 0xDA:  # the pixels, up to the end of the file
            break
        parts.next()
        if marker in JPEG_ALONE:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        end = at + 2 + max(length, 2)
        if marker in JPEG_PARTS:
            kept.append(data[at:end])
            room -= end - at
            if room < 0:
                raise DamagedError(f"its tables take more than {MAX_TABLE_BYTES} bytes")
        if marker in JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            sizes.append((width, height))
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = exif or data[at + 4 : end]
        at = end
    return Container(b"".join([*kept, data[at:]]), JpegImageFile, tuple(sizes), orientation(exif))


def _marker(data: bytes, at: int) -> int:
    """Where the next marker begins; filler and junk before it are passed over."""
    at = data.find(b"\xff", at)
    while 0 <= at < len(data) - 1:
        if data[at + 1] != 0xFF:
            return at
        run = data[at : at + 4096]
        at += len(run) - len(run.lstrip(b"\xff")) - 1
    raise DamagedError("its pixels are missing")


def _gif(data: bytes) -> Container:
    parts, screen = _Parts(), struct.unpack_from("<HH", data, 6)
    at = 13 + _colours(data[10])
    kept = [data[:at]]
    while data[at : at + 1] != b",":  # the first picture, which goes up to the end of the file
        if data[at : at + 1] in (b"", b";"):
            raise DamagedError("its pixels are missing")
        parts.next()
        start, is_extension = at, data[at : at + 1] == b"!"
        at += 2 if is_extension else 1
        while is_extension:
            parts.next()
            length = data[at] if at < len(data) else 0
            at += 1 + length
            is_extension = length > 0
        if data[start : start + 2] == b"!\xf9":  # which colour is transparent
            kept.append(data[start:at])
    left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
    return Container(b"".join([*kept, data[at:]]), GifImageFile, (screen, (left + width, top + height)))


def _colours(flags: int) -> int:
    """Bytes of a GIF file's palette."""
    return 3 << ((flags & 7) + 1) if flags & 128 else 0


def _webp(data: bytes) -> Container:
    """As it is: its decoder keeps to the parts that it needs. EXIF data are looked up among them."""
    parts, at = _Parts(), 12
    while at + 8 <= len(data):
        parts.next()
        (length,) = struct.unpack_from("<L", data, at + 4)
        if data[at : at + 4] == b"EXIF":
            return Container(data, WebPImageFile, _canvas(data), orientation(data[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return Container(data, WebPImageFile, _canvas(data))


def _canvas(data: bytes) -> tuple[Size, ...]:
    """The size of an extended WebP file, for whose whole area its decoder makes room."""
    if data[12:16] != b"VP8X":
        return ()
    width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    return ((width, height),)
