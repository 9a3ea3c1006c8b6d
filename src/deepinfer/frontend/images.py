"""The images of a prompt: read from what a caller gives, and put where the prompt names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.errors import RequestError, shown
from deepinfer.images.messages import ImageSpan
from deepinfer.images.prepare import Detail, ImagePreparer
from deepinfer.images.room import check_fits
from deepinfer.images.sources import ImageSource
from deepinfer.messages import Int32

MULTI_MODAL_KEYS = ("image_bytes", "image_sizes")


@dataclass(frozen=True)
class PromptImage:
    """One image of a prompt, not read yet.

    name: how errors call it. size: (width, height) that the file must have; None = any.
    """

    source: ImageSource
    name: str
    detail: Detail = "high"
    size: object = None


def listed_images(images: object) -> list[PromptImage]:
    """From a list of paths, bytes, pictures or data URLs. Raises RequestError."""
    if isinstance(images, str | bytes | Mapping) or not isinstance(images, Sequence):
        raise RequestError(f"images is {shown(images)}; it must be a list of paths, bytes, pictures or data URLs")
    return [PromptImage(source, f"images[{place}]") for place, source in enumerate(images)]


def data_url_images(images: object) -> list[PromptImage]:
    """The same from what strangers send: data URLs only, so nothing is read here or downloaded. Raises RequestError."""
    found = [] if images is None else listed_images(images)
    for image in found:
        if not isinstance(image.source, str) or image.source[:5].lower() != "data:":
            raise RequestError(
                f"{image.name} is {shown(image.source)}; it must be a data URL, as in data:image/png;base64,..."
            )
    return found


def multi_modal_images(data: object) -> list[PromptImage]:
    """From DeepInfer's form {"image_bytes": [bytes, ...], "image_sizes": [(width, height), ...]}.

    The sizes may be left out; where they are given, each file must have its size. Raises RequestError.
    """
    if not isinstance(data, Mapping) or "image_bytes" not in data or set(data) - set(MULTI_MODAL_KEYS):
        raise RequestError(
            f"multi_modal_data is {shown(data)}; it must hold image_bytes, a list, and may hold image_sizes"
        )
    files, sizes = _listed(data["image_bytes"]), data.get("image_sizes")
    try:
        sizes = [None] * len(files) if sizes is None else list(sizes)
    except TypeError:
        raise RequestError(f"image_sizes is {shown(sizes)}; it must be a list of (width, height)") from None
    if len(sizes) != len(files):
        raise RequestError(
            f"multi_modal_data has {len(files)} image_bytes but {len(sizes)} image_sizes; give one size for each image"
        )
    for place, file in enumerate(files):
        if not isinstance(file, bytes | bytearray | memoryview):
            raise RequestError(f"image_bytes[{place}] is {shown(file)}; it must be the bytes of an image file")
    pairs = zip(files, sizes, strict=True)
    return [PromptImage(file, f"image_bytes[{place}]", size=size) for place, (file, size) in enumerate(pairs)]


def place_images(
    token_ids: list[int], images: Sequence[PromptImage], preparer: ImagePreparer | None, max_tokens: int | None
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The prompt with as many image tokens as each image takes, where it had one, and where the images are.

    preparer: None = the model takes no images. max_tokens: of the prompt, None = any; images behind it are not read.
    Raises RequestError for an image that cannot be used, for a prompt that becomes too long or whose pixels are more
    than can ever be held, or if there are not as many images as placeholders.
    """
    if preparer is None:
        if images:
            raise RequestError(f"{images[0].name} is given, but this model takes no images; leave it out")
        return token_ids, ()
    token = preparer.geometry.token_id
    num_places = token_ids.count(token)
    if num_places != len(images):
        raise RequestError(
            f"prompt has {num_places} image placeholders (token {token}) but {len(images)} images are given; "
            "write one placeholder for each image"
        )
    if len(images) > preparer.max_images:
        raise RequestError(
            f"prompt has {len(images)} images; it may have {preparer.max_images}, leave some out or raise --max-images"
        )
    with preparer.turns:
        return _placed(token_ids, images, preparer, max_tokens)


def _placed(
    token_ids: list[int], images: Sequence[PromptImage], preparer: ImagePreparer, max_tokens: int | None
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """What `place_images` returns, image after image, until they are too many."""
    token = preparer.geometry.token_id
    ids: list[int] = []
    spans: list[ImageSpan] = []
    start, num_tokens = 0, len(token_ids)
    for given in images:
        end = token_ids.index(token, start)
        ids += token_ids[start:end]
        image = preparer.prepare(given.source, given.name, given.detail, given.size)
        num_tokens += image.num_tokens - 1
        if max_tokens is not None and num_tokens > max_tokens:
            raise RequestError(
                f"prompt has {num_tokens} tokens with {given.name} but must have at most {max_tokens}; "
                "give fewer or smaller images, shorten it or raise --max-model-len"
            )
        spans.append(ImageSpan(len(ids), image))
        check_fits(spans, preparer.max_bytes, f"the prompt up to {given.name}")
        ids += [token] * image.num_tokens
        start = end + 1
    return ids + token_ids[start:], tuple(spans)


def placeholders(token_ids: Int32, spans: Sequence[ImageSpan]) -> Int32:
    """The tokens of a placed prompt with one image token for each image again."""
    if not spans:
        return token_ids
    return np.delete(token_ids, np.concatenate([np.arange(span.start + 1, span.end) for span in spans]))


def _listed(files: Any) -> list[Any]:
    if isinstance(files, bytes | bytearray | memoryview):
        return [files]
    if not isinstance(files, Sequence):
        raise RequestError(f"image_bytes is {shown(files)}; it must be a list of the bytes of image files")
    return list(files)
