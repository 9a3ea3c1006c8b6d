"""What reaches a decoder of a file, and what made-up files cost."""

from __future__ import annotations

import io
import resource
import struct
import time
import warnings

import numpy as np
import pytest
from PIL import Image, ImageCms

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.containers import DamagedError, orientation, read_container
from deepinfer.images.decode import decode
from deepinfer.images.prepare import ImagePreparer

from .bombs import BOMBS, exif_of_everything, in_gif, in_jpeg, in_png, in_webp, jpeg_segment, png_chunk, webp_chunk
from .pictures import LIMITS, encoded, geometry, picture

SECRET = b"what no decoder has to see"


@pytest.mark.parametrize("name", BOMBS)
def test_made_up_files_cost_neither_time_nor_memory(name: str) -> None:
    file, before = BOMBS[name](4_000_000), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    preparer = ImagePreparer(geometry("nano"), ImageOptions())
    started = time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            assert preparer.prepare(file, "it").num_tokens
        except RequestError as error:
            assert str(error).startswith("it is ")
    assert time.thread_time() - started < 1.0  # each took a second to a minute, most of the time holding the GIL
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_decoder_sees_the_picture_only() -> None:
    """The pixels are those of the whole file, whose texts, profiles and other pictures stay behind."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image, exif = picture(90, 70), Image.Exif()
    exif[0x010E] = SECRET.decode()
    files = {
        "PNG": in_png(png_chunk(b"tEXt", b"a\0" + SECRET) + png_chunk(b"eXIf", exif.tobytes()[6:])),
        "JPEG": encoded(image, "JPEG", exif=exif, icc_profile=profile, comment=SECRET),
        "GIF": in_gif(b"!\xfe" + bytes([len(SECRET)]) + SECRET + b"\0"),
    }
    for kind, file in files.items():
        assert SECRET in file, kind
        container = read_container(file)
        assert SECRET not in container.data and b"ICC_PROFILE" not in container.data, kind
        assert container.sizes[0] == (90, 70)
        with Image.open(io.BytesIO(file)) as whole:
            assert np.array_equal(decode(file, "it", LIMITS), whole.convert("RGB")), kind


def test_a_gif_keeps_its_transparency_and_local_palette() -> None:
    image = picture(40, 30).quantize(16)
    file = encoded(image, "GIF", transparency=3, save_all=True, append_images=[picture(40, 30, seed=1)], loop=0)
    with Image.open(io.BytesIO(file)) as whole:
        expected = Image.new("RGB", whole.size, (253, 253, 253))
        layer = whole.convert("RGBA")
        expected.paste(layer, mask=layer.getchannel("A"))
    assert np.array_equal(decode(file, "it", LIMITS), expected)


@pytest.mark.parametrize("filler", [b"\xff" * 3, b"\0" * 9, b"\xff\0junk", b"\xff" * 5000])
def test_filler_between_segments_is_passed_over(filler: bytes) -> None:
    plain = decode(in_jpeg(b""), "it", LIMITS)
    assert np.array_equal(decode(in_jpeg(jpeg_segment(0xE5, b"abc") + filler), "it", LIMITS), plain)


@pytest.mark.parametrize(
    "file",
    [b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 99, in_jpeg(b"")[:200], b"GIF89a" + bytes(7), b"GIF89a" + bytes(9)],
)
def test_a_file_without_pixels_is_damaged(file: bytes) -> None:
    with pytest.raises((DamagedError, struct.error)):
        read_container(file)
    with pytest.raises(RequestError, match=r"^it is damaged or cut off"):
        decode(file, "it", LIMITS)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("value", [1, 3, 6, 8])
def test_the_orientation_is_read_from_exif(order: str, value: int) -> None:
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "L", 8)
    entries = [struct.pack(order + "HHLL", 0x0100, 4, 1, 7), struct.pack(order + "HHLHH", 0x0112, 3, 1, value, 0)]
    body = head + struct.pack(order + "H", 2) + b"".join(entries)
    assert orientation(body) == orientation(b"Exif\0\0" + body) == value
    for cut in range(len(body) - 3):
        assert orientation(body[:cut]) == 1
    assert orientation(body[:4] + b"\xff\xff\xff\xff" + body[8:]) == 1


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_upright(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert orientation(exif.tobytes()) == 1
    assert np.array_equal(decode(encoded(picture(), "PNG", exif=exif), "it", LIMITS), picture())


def test_every_format_is_turned_by_its_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes()
    for file in (
        in_png(png_chunk(b"eXIf", body[6:])), in_png(png_chunk(b"eXIf", body[6:]), before_pixels=False),
        in_jpeg(jpeg_segment(0xE1, body)), in_webp(webp_chunk(b"EXIF", body[6:])), in_webp(webp_chunk(b"EXIF", body)),
    ):  # fmt: skip
        assert decode(file, "it", LIMITS).size == (70, 90)


def test_exif_of_many_tags_is_looked_through_at_once() -> None:
    body = exif_of_everything(60_000, 4_000_000)
    started = time.thread_time()
    assert orientation(body) == 1
    assert time.thread_time() - started < 1.0
