"""attention_inputs and project_out against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from backends.cpu import family, pair
from backends.cpu.family import MODELS, Case, integers, normal
from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import AttentionWeights, RopeSpec, Weight
from model_configs import config

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 3e-6  # float32 sums in another order, through two products and a norm


def random_attention(heads: int, dim: int, rope: int, rank: int, hidden: int, groups: int) -> AttentionWeights:
    return AttentionWeights(
        wq_a=pair.random_weight(rank, hidden, seed=1),
        q_norm=pair.random_norm(rank, 2),
        wq_b=pair.random_weight(heads * dim, rank, seed=3),
        wkv=pair.random_weight(dim, hidden, seed=4),
        kv_norm=pair.random_norm(dim, 5),
        sink=Weight(normal(heads)),
        wo_a=pair.random_weight(groups * 24, heads * dim // groups, seed=6),
        wo_b=pair.random_weight(hidden, groups * 24, seed=7),
        num_heads=heads,
        num_groups=groups,
        window=8,
        rope=RopeSpec(rope, 10000.0),
    )


def weights_of(name: str) -> AttentionWeights:
    if name == "odd":
        return random_attention(heads=3, dim=32, rope=6, rank=20, hidden=50, groups=3)
    return family.weights(name).attention(3)


def sizes_of(name: str) -> tuple[int, int, int]:
    return (3, 32, 50) if name == "odd" else (config(name).num_heads, config(name).head_dim, config(name).hidden_size)


@functools.cache
def out(name: str) -> Case:
    """Of numbers that bf16 holds, to which tiles round them."""
    heads, dim, _ = sizes_of(name)
    return family.case(
        "project_out", "prepare_attention", (weights_of(name),), lambda n: (normal(n, heads, dim).bfloat16().float(),)
    )


@functools.cache
def inputs(name: str) -> Case:
    def arguments(count: int):
        return normal(count, sizes_of(name)[2]), integers(8192, count, dtype=torch.int32)

    return family.case("attention_inputs", "prepare_attention", (weights_of(name),), arguments)


@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_output_projection_is_that_of_the_reference(name):
    family.check_against_reference(out(name), LIMIT)


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_tiles_round_attended_numbers_to_the_nearest_bf16_numbers(name, count, kind):
    attended = normal(count, *sizes_of(name)[:2])
    found, rounded = (out(name).cpu((each,))[0] for each in (attended, attended.bfloat16().float()))
    assert torch.equal(found, rounded) == (kind == "tiles")


@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_inputs_are_those_of_the_reference(name):
    for count in family.BATCHES:
        arguments = inputs(name).arguments(count)
        low, q, packed = inputs(name).cpu(arguments)
        expected_low, expected_q, expected = inputs(name).reference(arguments)
        assert family.golden.row_error(low, expected_low) <= LIMIT
        assert family.golden.row_error(q.flatten(1), expected_q.flatten(1)) <= LIMIT
        # a last bit may decide the rounding to fp8, then a value is off by one step
        differs = (packed != expected).float().mean() if count else 0.0
        assert differs < 1e-3
        if count:
            assert family.golden.row_error(quant.unpack_window(packed), quant.unpack_window(expected)) < 0.03


@pytest.mark.parametrize("make", [inputs, out])
@pytest.mark.parametrize("name", [*MODELS, "odd"])
def test_a_token_has_the_same_bits_alone_and_among_others(make, name):
    family.check_bits(make(name))


@pytest.mark.parametrize("make", [inputs, out])
def test_numbers_may_lie_apart(make):
    family.check_strides(make("nano"))


def test_rows_of_x_may_be_part_of_a_wider_tensor():
    x, positions = inputs("golden").arguments(5)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    for actual, expected in zip(
        inputs("golden").cpu((wide, positions)), inputs("golden").cpu((x, positions)), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("position", [0, 1, 100_000, 1_000_000])
def test_rotation_is_as_good_at_far_positions(position):
    x, _ = inputs("nano").arguments(4)
    arguments = x, torch.full((4,), position, dtype=torch.int32)
    actual, expected = inputs("nano").cpu(arguments)[1], inputs("nano").reference(arguments)[1]
    assert family.golden.row_error(actual.flatten(1), expected.flatten(1)) <= LIMIT


def test_what_does_not_fit_is_refused():
    x, positions = inputs("nano").arguments(3)
    for arguments in ((x[:, :-1], positions), (x, positions[:2]), (x, positions.long()), (x.double(), positions)):
        with pytest.raises(ShapeError):
            inputs("nano").cpu(arguments)
    with pytest.raises(ShapeError):
        out("nano").cpu((normal(3, 8, 64),))
    good = weights_of("odd")
    for bad in (
        replace(good, num_heads=4),
        replace(good, num_groups=2),
        replace(good, q_norm=good.kv_norm),
        replace(good, sink=Weight(normal(2))),
        replace(good, rope=RopeSpec(64, 10000.0)),
    ):
        with pytest.raises(ShapeError):
            pair.cpu().prepare_attention(bad)
