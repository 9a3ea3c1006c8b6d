"""From files to pixels: the oracle's, bit for bit, and deepseek-recipe's, as far as its lossy files tell."""

from __future__ import annotations

import dataclasses
import io
import weakref

import deepseek_recipe as recipe
import numpy as np
import pytest
import torch
import v41_oracle as oracle
from PIL import Image

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.messages import ImageInput
from deepinfer.images.prepare import ImagePreparer, fit

from .pictures import encoded, geometry, oracle_vision, picture

SIZES = [(130, 90), (1, 1), (3, 700), (700, 3), (126, 126), (500, 400), (45, 44), (1300, 900), (2000, 61)]


RESOLVER = recipe.ImageResolver(recipe.ReqwestImageFetcher(), recipe.OpenCvImagePreprocessor())


def difference(one: Image.Image, other: Image.Image) -> np.ndarray:
    assert one.size == other.size
    return abs(np.asarray(one.convert("RGB")).astype(int) - np.asarray(other.convert("RGB")))


def preparer(model: str = "nano") -> ImagePreparer:
    return ImagePreparer(geometry(model), ImageOptions())


def patches(image: ImageInput, size: int) -> torch.Tensor:
    """The pixels as the oracle's patches, normalised."""
    height, width, _ = image.pixels.shape
    samples = torch.from_numpy(image.pixels).float().permute(2, 0, 1) / 255
    samples = ((samples - 0.5) / 0.5).to(torch.bfloat16).float()
    grid = samples.reshape(3, height // size, size, width // size, size).permute(1, 3, 0, 2, 4)
    return grid.reshape(-1, 3, size, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", ["golden", "nano"])
def test_pixels_are_the_oracle_s(model: str, size: tuple[int, int]) -> None:
    image, shape = picture(*size), geometry(model)
    ours = preparer(model).prepare(encoded(image), "it")
    theirs, rows, columns = oracle.image_patches(image, oracle_vision(model))
    assert ours.pixels.shape == (rows * shape.patch_size, columns * shape.patch_size, 3)
    assert torch.equal(patches(ours, shape.patch_size), theirs)
    assert ours.num_patches == rows * columns


@pytest.mark.parametrize("size", SIZES)
def test_images_that_are_too_wide_are_squeezed_as_the_oracle_does(size: tuple[int, int]) -> None:
    shape = dataclasses.replace(geometry("nano"), max_aspect=2.0)
    ours = ImagePreparer(shape, ImageOptions()).prepare(picture(*size), "it")
    theirs, _, _ = oracle.image_patches(picture(*size), oracle_vision("nano") | {"max_wh_ratio": 2.0})
    assert torch.equal(patches(ours, shape.patch_size), theirs)


@pytest.mark.parametrize("size", [(130, 90), (640, 480), (1000, 50), (50, 1000), (1300, 1100)])
def test_pixels_are_those_of_deepseek_recipe_up_to_its_compression(size: tuple[int, int]) -> None:
    image = picture(*size).convert("L").convert("RGB")  # grey, since WebP halves the resolution of colours
    (made,) = RESOLVER.resolve([recipe.BytesImageSource(encoded(image), "high")], recipe.ImageQuota()).images
    ours = fit(image, geometry("flash"))
    loss = difference(ours, Image.open(io.BytesIO(encoded(ours, "WEBP", quality=90))))  # as the recipe saves
    theirs = difference(ours, Image.open(io.BytesIO(made.data)))
    assert theirs.mean() < 1.1 * loss.mean() and theirs.max() <= 12  # a shift by one pixel doubles the mean and more


@pytest.mark.parametrize("size", [(640, 480), (1200, 1200), (1500, 500), (100, 2000), (200, 100)])
def test_low_detail_has_the_size_that_deepseek_recipe_gives(size: tuple[int, int]) -> None:
    (made,) = RESOLVER.resolve([recipe.BytesImageSource(encoded(picture(*size)), "low")], recipe.ImageQuota()).images
    ours = preparer("flash").prepare(picture(*size), "it", "low").pixels
    assert (ours.shape[1], ours.shape[0]) == (made.width, made.height)


def test_the_other_details_are_one() -> None:
    keys = {preparer("flash").prepare(picture(1500, 900), "it", detail).key for detail in ("high", "original", "auto")}
    assert len(keys) == 1
    assert preparer("flash").prepare(picture(1500, 900), "it", "low").key not in keys


def test_a_key_tells_content_and_size_apart_but_not_files() -> None:
    first, other = picture(130, 90, seed=1), picture(130, 90, seed=2)
    keys = [preparer().prepare(encoded(first, kind), "it").key for kind in ("PNG", "GIF")]
    keys += [preparer().prepare(image, "it").key for image in (first, other, first.rotate(90, expand=True))]
    assert keys[0] == keys[2] and len(set(keys)) == 4
    flat = [preparer().prepare(Image.new("RGB", size, (9, 9, 9)), "it").key for size in ((126, 168), (168, 126))]
    assert flat[0] != flat[1]  # the same bytes in another shape


def test_images_in_use_are_in_memory_once() -> None:
    one = preparer()
    first = one.prepare(picture(seed=1), "it")
    assert one.prepare(encoded(picture(seed=1)), "it") is first
    assert one.prepare(picture(seed=2), "it") is not first
    gone = weakref.ref(first)
    del first
    assert gone() is None and one.prepare(picture(seed=1), "it").num_tokens


def test_sizes_that_are_given_must_be_true() -> None:
    data = encoded(picture(40, 30))
    assert preparer().prepare(data, "it", size=(40, 30)).num_tokens > 0
    with pytest.raises(RequestError, match=r"it is 40 x 30 pixels, but its size is given as \(30, 40\)"):
        preparer().prepare(data, "it", size=(30, 40))
    for bad in ("ab", 7, (1,), (None, 2)):
        with pytest.raises(RequestError, match="size"):
            preparer().prepare(data, "it", size=bad)


def test_an_unknown_detail_is_refused() -> None:
    with pytest.raises(RequestError, match=r"detail of it is 'fine'; it must be one of low, high, original, auto"):
        preparer().prepare(picture(), "it", "fine")  # type: ignore[arg-type]


def test_an_image_that_shrinks_to_less_than_a_pixel_keeps_one() -> None:
    thin = dataclasses.replace(geometry("golden"), min_pixels=0)
    made = np.asarray(fit(Image.new("RGB", (8192, 1), (255, 0, 0)), thin))
    assert (made == (255, 0, 0)).all(axis=2).any(axis=0).all() and (made[0] == 127).all()
