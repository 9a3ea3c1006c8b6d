"""hyper_enter, hyper_leave and hyper_next against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import functools

import pytest
import torch

from backends.cpu import family, pair
from backends.cpu.family import MODELS, Case, normal, uniform
from deepinfer.errors import ShapeError
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HyperWeights, Weight
from model_configs import config

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 2e-6  # 20 Sinkhorn rounds of float32 divisions against products with reciprocals


@functools.cache
def enter(model: str, half: str = "attn") -> Case:
    weights, sizes = family.weights(model), config(model)
    norm = weights.attention_norm(1) if half == "attn" else weights.ffn_norm(1)

    def arguments(count: int):
        streams = normal(count, sizes.num_streams, sizes.hidden_size).bfloat16().float()  # as a mix by tiles has them
        return streams, uniform(count, sizes.num_streams, seed=1)

    return family.case("hyper_enter", "prepare_hyper", (weights.hyper(1, half), norm), arguments)


@functools.cache
def leave(model: str) -> Case:
    sizes = config(model)
    m, hidden = sizes.num_streams, sizes.hidden_size

    def arguments(count: int):
        mix = Mix(uniform(count, m), uniform(count, m, seed=1), uniform(count, m, m, seed=2))
        return normal(count, m, hidden), normal(count, hidden, seed=3), mix

    return Case("hyper_leave", lambda: (None, None), arguments)


@functools.cache
def following(model: str) -> Case:
    weights = family.weights(model)
    given = weights.hyper(1, "ffn"), weights.ffn_norm(1)
    return family.case("hyper_next", "prepare_hyper", given, leave(model).arguments)


def weights_of(streams: int, hidden: int, rounds: int) -> HyperWeights:
    width = (2 + streams) * streams
    fn, base = normal(width, streams * hidden, seed=4) * 0.05, normal(width, seed=5)
    return HyperWeights(Weight(fn), Weight(base), Weight(torch.tensor([0.5, 1.0, 2.0])), rounds, 1e-6, 1e-6)


@functools.cache
def other(streams: int, hidden: int, rounds: int) -> Case:
    def arguments(count: int):
        return normal(count, streams, hidden), uniform(count, streams, seed=1)

    given = weights_of(streams, hidden, rounds), pair.random_norm(hidden, 6)
    return family.case("hyper_enter", "prepare_hyper", given, arguments)


@pytest.mark.parametrize("make", [enter, leave, following])
@pytest.mark.parametrize("model", MODELS)
def test_results_are_those_of_the_reference(make, model, kind):
    rounds = make is following and kind == "tiles"  # its streams to bf16, for the mix
    family.check_against_reference(make(model), 3e-3 if rounds else LIMIT)


@pytest.mark.parametrize("make", [enter, leave, following])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_has_the_same_bits_alone_and_among_others(make, model):
    family.check_bits(make(model))


@pytest.mark.parametrize(("streams", "hidden", "rounds"), [(1, 32, 3), (2, 40, 1), (3, 17, 20), (5, 64, 7), (16, 8, 2)])
def test_any_number_of_streams_and_any_width(streams, hidden, rounds):
    case = other(streams, hidden, rounds)
    family.check_against_reference(case, 2e-5)  # the reference leaves out the eps of all divisors but the last
    family.check_bits(case)


def test_the_mix_by_tiles_is_that_of_streams_rounded_to_bf16(kind):
    case = enter("nano")
    streams, pre = case.arguments(60)
    uneven = streams * (1 + 0.003 * (uniform(*streams.shape, seed=3) - 0.5))
    mixes = [case.cpu((given, pre))[1:] for given in (uneven, uneven.bfloat16().float())]
    difference = max(float((one - other).abs().max()) for one, other in zip(*mixes, strict=True))
    assert (difference < 1e-4) == (kind == "tiles")  # the mean square is that of the streams as they are


def test_numbers_may_lie_apart():
    family.check_strides(enter("nano"))
    arguments = leave("nano").arguments(7)
    streams, output, mix = arguments
    apart = (pair.spread(streams), pair.spread(output), Mix(*(pair.spread(part) for part in family.flat(mix))))
    assert torch.equal(leave("nano").cpu(apart)[0], leave("nano").cpu(arguments)[0])


def test_extreme_logits_stay_finite():
    case = other(4, 32, 20)
    streams, pre = case.arguments(9)
    for actual, expected in zip(case.cpu((streams * 1e4, pre)), case.reference((streams * 1e4, pre)), strict=True):
        assert actual.isfinite().all()
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_nan_stays_in_its_token():
    case = enter("nano")
    streams, pre = case.arguments(9)
    clean = case.cpu((streams, pre))
    streams[4, 0, 0] = torch.nan
    for actual, expected in zip(case.cpu((streams, pre)), clean, strict=True):
        assert actual[4].isnan().any()
        assert torch.equal(actual[:4], expected[:4])
        assert torch.equal(actual[5:], expected[5:])


def test_what_does_not_fit_is_refused():
    streams, pre = enter("nano").arguments(3)
    for arguments in ((streams[:, :3], pre), (streams, pre[:2]), (streams.double(), pre)):
        with pytest.raises(ShapeError):
            enter("nano").cpu(arguments)
    with pytest.raises(ShapeError, match="rows"):
        pair.cpu().prepare_hyper(
            HyperWeights(Weight(normal(25, 64)), Weight(normal(25)), Weight(normal(3)), 1, 1e-6, 1e-6),
            pair.random_norm(16, 0),
        )
    many = normal(1, 17, 8)
    mix = Mix(normal(1, 17), normal(1, 17), normal(1, 17, 17))
    with pytest.raises(ShapeError, match="17 streams"):
        pair.cpu().hyper_leave(many, normal(1, 8), mix)
