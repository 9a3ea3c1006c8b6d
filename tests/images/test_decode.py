"""Files of every kind: the right pixels, or an error that names the image."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from deepinfer.errors import RequestError
from deepinfer.images.decode import BACKGROUND, MAX_SCANS, MAX_SIDE, ImageLimits, decode, to_rgb

from .bombs import png_chunk
from .pictures import LIMITS, encoded, picture


def pixels(data: bytes) -> np.ndarray:
    image = decode(data, "image 1", LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(RequestError, match=r"^image 1 ") as error:
        decode(data, "image 1", limits)
    return str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_files_without_loss_give_their_pixels(kind: str) -> None:
    settings = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(pixels(encoded(picture(), kind, **settings)), np.asarray(picture()))


@pytest.mark.parametrize("settings", [{}, {"progressive": True}])
def test_jpeg_files_give_about_their_pixels(settings: dict) -> None:
    assert abs(pixels(encoded(picture(), "JPEG", quality=95, **settings)) - np.asarray(picture())).mean() < 2


def test_a_cmyk_file_has_its_colours() -> None:
    red = Image.new("RGB", (40, 30), (200, 30, 40))
    found = pixels(encoded(red.convert("CMYK"), "JPEG", quality=95))
    assert abs(found - (200, 30, 40)).max() <= 4


def test_sixteen_bit_grey_keeps_its_high_byte_also_when_it_is_dark() -> None:
    for top in (65535, 200):
        samples = np.linspace(0, top, 30 * 40).astype(np.uint16).reshape(30, 40)
        found = pixels(encoded(Image.fromarray(samples)))
        assert np.array_equal(found, np.repeat(samples[..., None] >> 8, 3, axis=2))


def test_sixteen_bit_colours_keep_their_high_byte() -> None:
    samples = np.random.default_rng(0).integers(0, 65536, (5, 4, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + line.astype(">u2").tobytes() for line in samples)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 4, 5, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(name, body) for name, body in chunks)
    assert np.array_equal(pixels(file), samples >> 8)


def test_transparency_shows_the_background() -> None:
    layer = Image.new("RGBA", (20, 10), (10, 20, 30, 0))
    assert (pixels(encoded(layer)) == BACKGROUND).all()
    half = pixels(encoded(Image.new("RGBA", (20, 10), (0, 0, 0, 128))))
    assert abs(half - 253 * 127 / 255).max() <= 1


def test_a_transparent_colour_of_a_palette_shows_the_background() -> None:
    image = Image.new("P", (20, 10), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (0, 0, 10, 10))
    found = pixels(encoded(image, transparency=0))
    assert (found[:, :10] == (0, 255, 0)).all() and (found[:, 10:] == BACKGROUND).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_turns_the_picture_upright(orientation: int) -> None:
    upright = picture(30, 20)
    undo = [
        None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270,
    ][orientation - 1]  # fmt: skip
    stored = upright if undo is None else upright.transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels(encoded(stored, exif=exif)), np.asarray(upright))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert abs(pixels(data) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"])
def test_pictures_of_every_mode_become_rgb(mode: str) -> None:
    grey = Image.new("RGB", (4, 3), (90, 90, 90))
    source = (
        grey.convert("RGBA").convert(mode) if mode == "RGBa" else Image.new(mode, (4, 3)) if mode == "LAB" else None
    )
    rgb = to_rgb(source or grey.convert(mode))
    assert (rgb.mode, rgb.size) == ("RGB", (4, 3))
    if mode not in ("1", "P", "LAB"):
        assert abs(np.asarray(rgb).astype(int) - 90).max() <= 2


def test_a_picture_of_one_pixel_is_taken() -> None:
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


def test_what_is_too_long_is_refused() -> None:
    assert f"30000 x 1 pixels; each side must be 1 to {MAX_SIDE}" in refusal(encoded(Image.new("1", (30000, 1))))


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("1", (2000, 2000)))
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    assert "2000 x 2000 = 4000000 pixels; an image may have 1048576" in refusal(data)


def test_a_decompression_bomb_is_refused() -> None:
    huge = io.BytesIO()
    Image.new("1", (8000, 8000)).save(huge, "PNG")
    wide = bytearray(huge.getvalue())
    wide[16:24] = struct.pack(">II", 60000, 60000)
    wide[29:33] = struct.pack(">I", zlib.crc32(bytes(wide[12:29])))
    for data in (huge.getvalue(), bytes(wide)):
        assert re.search(r"64000000 pixels|60000 x 60000 pixels; each side", refusal(data))


def test_a_file_that_is_too_large_is_refused() -> None:
    assert "has 5000 bytes; an image may have 4000" in refusal(bytes(5000), ImageLimits(4000, 100))


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    data = encoded(picture(), "JPEG", progressive=True)
    scans = data[data.index(b"\xff\xda") : -2]
    assert f"more than {MAX_SCANS} scans" in refusal(data[:-2] + scans * MAX_SCANS + data[-2:])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_is_cut_off_is_refused(kind: str) -> None:
    data = encoded(picture(), kind)
    for share in (0.3, 0.7):
        assert "is damaged or cut off" in refusal(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"hello", b"%PDF-1.7 ...", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert "is no image in one of the formats PNG, JPEG, WEBP, GIF" in refusal(data)


def test_formats_that_are_not_taken_are_refused() -> None:
    for kind in ("BMP", "TIFF", "ICO", "PPM", "TGA"):
        assert "is no image in one of the formats" in refusal(encoded(picture(), kind))


def test_an_empty_file_is_refused() -> None:
    assert refusal(b"") == "image 1 is empty; give the bytes of an image file"
