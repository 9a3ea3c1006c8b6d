"""engram against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from backends.cpu import family, pair
from backends.cpu.family import MODELS, Case, integers, normal, uniform
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import Weight
from model_configs import config

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 2e-6  # float32 sums in another order


@functools.cache
def engram(model: str, with_images: bool = False) -> Case:
    sizes = config(model)
    assert sizes.engram is not None
    columns, num_rows = sizes.engram.num_columns, sizes.engram.tables[0].num_rows

    def arguments(count: int):
        image = uniform(count, seed=2) < 0.5 if with_images else None
        streams = normal(count, sizes.num_streams, sizes.hidden_size)
        return streams, integers(num_rows, count, columns, seed=1), image

    return family.case("engram", "prepare_engram", (family.weights(model).engram(1),), arguments)


@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_results_are_those_of_the_reference(model, with_images):
    family.check_against_reference(engram(model, with_images), LIMIT)


@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_has_the_same_bits_alone_and_among_others(model, with_images):
    family.check_bits(engram(model, with_images))


def test_numbers_may_lie_apart():
    family.check_strides(engram("golden", True))


def test_image_tokens_pass_unchanged():
    streams, rows, image = engram("nano", True).arguments(20)
    result = engram("nano", True).cpu((streams, rows, image))[0]
    assert torch.equal(result[image], streams[image])
    assert not torch.equal(result[~image], streams[~image])


@pytest.mark.parametrize("row", [-1, 16242, 2**40])
def test_a_row_outside_of_the_table_is_refused(row):
    streams, rows, _ = engram("nano").arguments(3)
    rows[2, 1] = row
    with pytest.raises(ShapeError, match="the table has 16242"):
        engram("nano").cpu((streams, rows, None))


def test_what_does_not_fit_is_refused():
    streams, rows, image = engram("nano", True).arguments(3)
    for arguments in ((streams[:2], rows, image), (streams, rows[:, 1:], image), (streams, rows, image[:2])):
        with pytest.raises(ShapeError):
            engram("nano").cpu(arguments)
    good = family.weights("nano").engram(1)
    with pytest.raises(ShapeError, match="scales"):
        pair.cpu().prepare_engram(replace(good, table=Weight(good.table.value)))
    with pytest.raises(ShapeError, match="rows"):
        pair.cpu().prepare_engram(
            replace(good, q_weight=Weight(good.q_weight.value[:2]), k_weight=Weight(good.k_weight.value[:2]))
        )
