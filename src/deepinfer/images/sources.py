"""What callers give as an image: the bytes of an image file, or a picture that is open already."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from PIL import Image, ImageOps

from deepinfer.errors import RequestError, shown
from deepinfer.images.decode import ImageLimits, check_bytes, check_size, to_rgb

FileSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview  # a text is a data URL or a path
ImageSource: TypeAlias = FileSource | Image.Image
MAX_HEAD_CHARS = 1024  # of a data URL, before the comma in front of its body
IS_BASE64 = re.compile(r"; *base64 *$", re.IGNORECASE)
WHITE_SPACE = b"\t\n\f\r "  # which tools put among base64, and browsers pass over


def image_bytes(source: FileSource, name: str, limits: ImageLimits) -> bytes:
    """The bytes of an image file, still unchecked but for their number.

    A text is a data URL or a path on this machine; callers that pass on what others wrote use `data_url_bytes`.
    name: how errors call the image. Raises RequestError for what cannot be read.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        check_bytes(len(data), name, limits)
        return data
    if isinstance(source, str) and source[:5].lower() == "data:":
        return data_url_bytes(source, name, limits)
    if isinstance(source, str) and source.partition("://")[0].lower() in ("http", "https"):
        raise RequestError(f"{name} is at {shown(source)}; this engine downloads no images, give its bytes")
    if not isinstance(source, str | os.PathLike):
        raise RequestError(f"{name} is {shown(source)}; it must be a path, bytes, a picture or a data URL")
    return _file_bytes(source, name, limits)


def data_url_bytes(url: str, name: str, limits: ImageLimits) -> bytes:
    """The body of a data URL (RFC 2397). Raises RequestError for another text or a damaged body."""
    comma = url.find(",", 0, MAX_HEAD_CHARS)
    if url[:5].lower() != "data:" or comma < 0:
        raise RequestError(f"{name} is {shown(url)}; it must be a data URL, as in data:image/png;base64,...")
    body, is_base64 = url[comma + 1 :], IS_BASE64.search(url, 0, comma) is not None
    if len(body) > 3 * limits.max_bytes + 1024:  # more than any spelling of so many bytes
        check_bytes(len(body), name, limits)
    try:
        data = unquote_to_bytes(body) if "%" in body or not is_base64 else body.encode()
        if is_base64:
            data = base64.b64decode(data.translate(None, WHITE_SPACE), validate=True)
    except ValueError as error:  # of base64, and of a lone surrogate
        raise RequestError(f"{name} is a data URL whose body is damaged ({error}); encode it again") from None
    check_bytes(len(data), name, limits)
    return data


def opened_picture(image: Image.Image, name: str, limits: ImageLimits) -> Image.Image:
    """A picture of the caller's as RGB and upright, as `decode` gives those of files. Raises RequestError."""
    check_size(image.size, name, limits)
    try:
        return to_rgb(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError) as error:
        raise RequestError(f"{name} cannot be read: {str(error)[:120]}") from None


def _file_bytes(path: str | os.PathLike[str], name: str, limits: ImageLimits) -> bytes:
    name = f"{name} ({shown(os.fspath(path))})"
    try:
        if not Path(path).is_file():
            raise RequestError(f"{name} is no file; give the path of an image file")
        with Path(path).open("rb") as stream:
            data = stream.read(limits.max_bytes + 1)
    except RequestError:
        raise
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a character that no path has
        raise RequestError(f"{name} cannot be read: {error}") from None
    check_bytes(len(data), name, limits)
    return data
