"""Files that are small or sound to look at, and made to cost a decoder time or memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from PIL import Image

from deepinfer.images.decode import MAX_SCANS

from .pictures import encoded, picture


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def in_png(chunks: bytes, *, before_pixels: bool = True) -> bytes:
    """A small picture with more chunks."""
    file = encoded(picture(90, 70), "PNG")
    at = file.index(b"IDAT" if before_pixels else b"IEND") - 4
    return file[:at] + chunks + file[at:]


def in_jpeg(segments: bytes) -> bytes:
    file = encoded(picture(90, 70), "JPEG")
    return file[:2] + segments + file[2:]


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def in_gif(blocks: bytes) -> bytes:
    file = encoded(picture(90, 70).quantize(16), "GIF")
    at = file.index(b",\0\0\0\0")
    return file[:at] + blocks + file[at:]


def wide_gif(side: int) -> bytes:
    """One pixel on a screen of side x side, which is cleared behind it."""
    file = bytearray(encoded(Image.new("P", (1, 1)), "GIF"))
    file[6:10] = struct.pack("<HH", side, side)
    control = b"!\xf9\x04\x08\0\0\0\0"
    at = file.index(b",\0\0\0\0")
    file[at + 5 : at + 9] = struct.pack("<HH", side, side)
    return bytes(file[:at] + control + file[at:])


def exif_of_everything(num_tags: int, num_bytes: int) -> bytes:
    """As many tags, each of which is all of the data."""
    entries = b"".join(struct.pack("<HHLL", tag + 1, 7, num_bytes // 2, 0) for tag in range(num_tags))
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", num_tags) + entries).ljust(num_bytes, b"\0")


def scans(image: Image.Image, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    file = encoded(image, "JPEG", progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + last * num_scans + b"\xff\xd9"


def deep(width: int, height: int) -> bytes:
    """A PNG of 16-bit colours with alpha, all zero."""
    pixels = zlib.compress(bytes(height * (1 + 8 * width)), 9)
    head = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        png_chunk(name, body) for name, body in ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b""))
    )


def webp_chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<L", len(body)) + body + b"\0" * (len(body) % 2)


def in_webp(chunks: bytes) -> bytes:
    """A small picture in the extended format, with more chunks behind it."""
    image = encoded(picture(90, 70), "WEBP")[12:]
    body = b"WEBP" + webp_chunk(b"VP8X", struct.pack("<L", 8) + b"\x59\0\0\x45\0\0") + image + chunks
    return b"RIFF" + struct.pack("<L", len(body)) + body


def wide_webp(side: int) -> bytes:
    """The head of a lossless file of side x side."""
    bits = struct.pack("<L", (side - 1) | (side - 1) << 14)
    body = b"WEBP" + webp_chunk(b"VP8L", b"\x2f" + bits + bytes(30))
    return b"RIFF" + struct.pack("<L", len(body)) + body


# Name: a file of about so many bytes.
BOMBS: dict[str, Callable[[int], bytes]] = {
    "png of tiny chunks": lambda size: in_png(png_chunk(b"abCd", b"") * (size // 12)),
    "png of tiny chunks behind the pixels": lambda size: in_png(
        png_chunk(b"abCd", b"") * (size // 12), before_pixels=False
    ),
    "png of empty pixel chunks": lambda size: in_png(png_chunk(b"IDAT", b"") * (size // 12)),
    "png of colour profiles": lambda size: in_png(
        (one := png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000)))) * (size // len(one))
    ),
    "png of packed texts": lambda size: in_png(
        (one := png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000)))) * (size // len(one))
    ),
    "png, one large packed text": lambda size: in_png(
        png_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(size * 100)))
    ),
    "png of exif": lambda size: in_png(png_chunk(b"eXIf", exif_of_everything(20_000, size))),
    "jpeg of exif": lambda size: in_jpeg(jpeg_segment(0xE1, b"Exif\0\0II*\0") * (size // 14)),
    "jpeg of exif tags": lambda size: in_jpeg(jpeg_segment(0xE1, b"Exif\0\0" + exif_of_everything(5000, 65_000))),
    "jpeg of several pictures": lambda size: in_jpeg(
        jpeg_segment(0xE2, b"MPF\0" + exif_of_everything(5000, 65_000))
    ),
    "jpeg of tiny segments": lambda size: in_jpeg(jpeg_segment(0xE5, b"") * (size // 4)),
    "jpeg of filler": lambda size: in_jpeg(b"\xff" * size),
    "jpeg of junk": lambda size: in_jpeg(b"\0" * size),
    "jpeg of layers": lambda size: in_jpeg(
        jpeg_segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\0\0\0\0\0\0\0" * 5400) * (size // 64_840)
    ),
    "jpeg of tables": lambda size: in_jpeg(
        jpeg_segment(0xDB, (b"\0" + bytes(range(1, 65))) * 1000) * (size // 65_004)
    ),
    "gif of comments": lambda size: in_gif(b"!\xfe" + b"\1a" * (size // 2) + b"\0"),
    "gif of extensions": lambda size: in_gif(b"!\xff\x01a\0" * (size // 5)),
    "gif of a large screen": lambda size: wide_gif(13_000),
    "webp of a large canvas": lambda size: wide_webp(13_000),
    "webp of tiny chunks": lambda size: in_webp(webp_chunk(b"abcd", b"") * (size // 8)),
    "webp of exif": lambda size: in_webp(webp_chunk(b"EXIF", exif_of_everything(20_000, size))),
    "jpeg of scans": lambda size: scans(picture(300, 300), MAX_SCANS - 10),
}  # fmt: skip
