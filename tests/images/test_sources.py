"""Paths, bytes, pictures and data URLs, and what they may not be."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from deepinfer.errors import RequestError
from deepinfer.images.decode import ImageLimits
from deepinfer.images.sources import data_url_bytes, image_bytes, opened_picture

from .pictures import LIMITS, encoded, picture

FILE = encoded(picture(40, 30))


def test_bytes_of_any_kind_are_taken_as_they_are() -> None:
    for data in (FILE, bytearray(FILE), memoryview(FILE)):
        assert image_bytes(data, "it", LIMITS) == FILE


def test_paths_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(FILE)
    assert image_bytes(file, "it", LIMITS) == image_bytes(str(file), "it", LIMITS) == FILE


def test_data_urls_are_decoded() -> None:
    text = base64.b64encode(FILE).decode()
    for url in (
        f"data:image/png;base64,{text}",
        f"DATA:image/png;charset=x;BASE64,{text}",
        f"data:;base64,{text}",
        f"data:image/png;base64,{quote(text)}",
        f"data:image/png,{quote(FILE)}",
        f"data:image/png; base64 ,{text[:90]}\r\n{text[90:]} \t\n",
        f"data:image/png;base64,{quote(text[:9] + chr(10) + text[9:])}",
        f"data:text/plain;base64,{text}",
    ):
        assert image_bytes(url, "it", LIMITS) == data_url_bytes(url, "it", LIMITS) == FILE


def test_opened_pictures_lose_nothing_and_stay_as_they_are(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.png").write_bytes(encoded(picture(40, 30), exif=exif))
    with Image.open(tmp_path / "a.png") as turned:
        assert np.array_equal(
            opened_picture(turned, "it", LIMITS), picture(40, 30).transpose(Image.Transpose.ROTATE_270)
        )
        assert turned.size == (40, 30)
    small = ImageLimits(max_bytes=100, max_pixels=1 << 20)  # of files only
    assert np.array_equal(opened_picture(picture(40, 30), "it", small), picture(40, 30))


def test_opened_pictures_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(RequestError, match=r"it is 2000 x 2000 = 4000000 pixels"):
        opened_picture(Image.new("1", (2000, 2000)), "it", LIMITS)
    with pytest.raises(RequestError, match=r"it is 0 x 9 pixels; each side must be 1 to 8192"):
        opened_picture(Image.new("L", (0, 9)), "it", LIMITS)
    with (
        Image.open(io.BytesIO(FILE[:300])) as cut,
        pytest.raises(RequestError, match="^it cannot be read: image file is truncated"),
    ):
        opened_picture(cut, "it", LIMITS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://example.org/a.png", r"it is at 'http://example.org/a.png'; this engine downloads no images"),
        ("HTTPS://example.org/a.png", r"this engine downloads no images"),
        ("data:image/png;base64,@@@@", r"it is a data URL whose body is damaged \(Only base64"),
        ("data:image/png;base64,AAA", r"whose body is damaged \(Incorrect padding\); encode it again"),
        ("data:image/png;base64,_-__", r"whose body is damaged"),
        ("data:image/png;base64,A\0AA", r"whose body is damaged"),
        ("data:image/png;base64,\ud800", r"whose body is damaged"),
        ("data:image/png;base64,%41\ud800", r"whose body is damaged"),
        ("data:image/png,\ud800", r"whose body is damaged"),
        ("data:image/png;base64,", r"it is empty"),
        ("data:nothing", r"it must be a data URL"),
        ("data:image/png" + ";a" * 600 + ";base64,AAAA", r"it must be a data URL"),
        ("file:///a.png", r"it \('file:///a.png'\) is no file"),
        ("/no/such/file.png", r"it \('/no/such/file.png'\) is no file"),
        ("\0", r"it \('\\x00'\) (is no file|cannot be read)"),
        ("/", r"it \('/'\) is no file"),
        (b"", r"it is empty"),
        (7, r"it is 7; it must be a path, bytes, a picture or a data URL"),
        (None, r"it is None; it must be"),
    ],
)
def test_other_sources_are_refused(source: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        image_bytes(source, "it", LIMITS)  # type: ignore[arg-type]


def test_a_text_of_others_is_never_a_path(tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(FILE)
    for text in (str(file), f"file://{file}"):
        with pytest.raises(RequestError, match="must be a data URL"):
            data_url_bytes(text, "it", LIMITS)


def test_bytes_are_counted_before_they_are_read(tmp_path: Path) -> None:
    small = ImageLimits(100, 10**6)
    file = tmp_path / "large.png"
    with file.open("wb") as stream:
        stream.truncate(10**12)  # sparse
    for source in (file, bytes(101), "data:;base64," + "A" * 10**6):
        with pytest.raises(RequestError, match=r"bytes; an image may have 100"):
            image_bytes(source, "it", small)


@pytest.mark.parametrize("text", ["data:" + "a" * 30_000_000, "data:;" + "a" * 30_000_000, "data:," + "%" * 30_000_000])
def test_very_long_texts_are_refused_at_once_in_few_words(text: str) -> None:
    started = time.thread_time()
    with pytest.raises(RequestError) as error:
        data_url_bytes(text, "it", LIMITS)
    assert time.thread_time() - started < 1.0  # a pattern took 3 s to find no comma, holding the GIL
    assert len(str(error.value)) < 200
    with pytest.raises(RequestError, match="cannot be read: File name too long") as error:
        image_bytes(text[5:], "it", LIMITS)
    assert len(str(error.value)) < 200
