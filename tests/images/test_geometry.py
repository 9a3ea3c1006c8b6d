"""The resize plan against the oracle's and deepseek-recipe's."""

from __future__ import annotations

import dataclasses
import json
import math

import deepseek_recipe as recipe
import numpy as np
import pytest
import v41_oracle as oracle

from .pictures import TESTS, geometry, oracle_vision


def random_sizes(count: int, largest: float, seed: int) -> list[tuple[int, int]]:
    sides = np.exp(np.random.default_rng(seed).uniform(0, math.log(largest), (count, 2)))
    return [(int(width), int(height)) for width, height in sides]


@pytest.mark.parametrize("model", ["golden", "nano", "flash"])
def test_plan_is_the_oracle_s_for_images_of_all_shapes(model: str) -> None:
    ours, theirs = geometry(model), oracle_vision(model)
    for size in [(1, 1), (8192, 1), (1, 8192), (30000, 1), *random_sizes(2000, 9000, 1)]:
        assert ours.plan(*size) == oracle.plan_image(*size, theirs), size


@pytest.mark.parametrize("widest", [1, 2.5, 8])
def test_plan_of_a_model_that_squeezes_wide_images_is_the_oracle_s(widest: float) -> None:
    ours = dataclasses.replace(geometry("nano"), max_aspect=widest)
    theirs = oracle_vision("nano") | {"max_wh_ratio": widest}
    for size in random_sizes(500, 5000, 2):
        assert ours.plan(*size) == oracle.plan_image(*size, theirs), size


def test_golden_plans_are_met() -> None:
    case = json.loads((TESTS / "golden" / "nano" / "goldens" / "goldens.json").read_text())["image"]
    for plan in case["resize_plan"]:
        assert geometry("golden").plan(*plan["image"]) == tuple(plan["resized"])


def test_positions_are_those_that_the_oracle_spells_out() -> None:
    shape = geometry("nano")
    for size in random_sizes(200, 4000, 3):
        width, height = shape.plan(*size)
        span = oracle.ImageSpan(0, None, height // shape.patch_size, width // shape.patch_size)
        assert shape.num_tokens(width, height) == len(span.types(shape.merge)) <= shape.max_tokens
        assert shape.num_patches(width, height) == span.rows * span.columns


def test_positions_are_as_many_as_deepseek_recipe_counts() -> None:
    """The recipe plans a planned size again until nothing changes; only for extreme shapes does that matter."""
    shape, num_again = geometry("flash"), 0
    for size in random_sizes(400, 8192, 4):
        planned = shape.plan(*size)
        first = planned
        while (again := shape.plan(*planned)) != planned:
            planned = again
        num_again += planned != first
        counted = recipe.MultiModalData([recipe.ImageInfo(b"", *size)]).image_token_adjustment() + 1
        assert shape.num_tokens(*planned) == counted, size
        assert planned == first or max(size) > 25 * min(size), size
    assert num_again > 0
