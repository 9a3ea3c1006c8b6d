"""route, experts and shared_expert against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from backends.cpu import family, pair
from backends.cpu.family import MODELS, Case, normal, uniform
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import ExpertWeights, RouterWeights, Weight
from model_configs import config

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 3e-6  # float32 sums in another order, through two products and a SwiGLU


@functools.cache
def experts(model: str) -> Case:
    sizes = config(model)

    def arguments(count: int):
        chosen = uniform(count, sizes.num_experts, seed=1).argsort(1)[:, : sizes.num_active_experts].int()
        return normal(count, sizes.hidden_size), chosen, uniform(count, sizes.num_active_experts, seed=2)

    return family.case("experts", "prepare_experts", (family.weights(model).experts(1),), arguments)


@functools.cache
def shared(model: str) -> Case:
    def arguments(count: int):
        return normal(count, config(model).hidden_size), normal(count, config(model).hidden_size, seed=1)

    return family.case("shared_expert", "prepare_shared_expert", (family.weights(model).shared_expert(1),), arguments)


@functools.cache
def router(model: str) -> Case:
    return family.case(
        "route",
        "prepare_router",
        (family.weights(model).router(1),),
        lambda n: (normal(n, config(model).hidden_size), None),
    )


def random_router(**changes) -> RouterWeights:
    weight, biases = pair.random_weight(13, 40, seed=1), (Weight(normal(13, seed=2)), Weight(normal(13, seed=3)))
    values = {"num_active": 5, "scoring": "sqrtsoftplus", "normalize": True, "scaling": 1.5, "temperature": 1.0}
    return RouterWeights(weight, *biases, **(values | changes))


@functools.cache
def other_router(**changes) -> Case:
    def arguments(count: int):
        return normal(count, 40) * 3, uniform(count, seed=4) < 0.5

    return family.case("route", "prepare_router", (random_router(**changes),), arguments)


def random_experts(count: int, hidden: int, inner: int, limit: float) -> ExpertWeights:
    w1, w2, w3 = (
        pair.random_weight(count, *shape, seed=seed)
        for seed, shape in enumerate(((inner, hidden), (hidden, inner), (inner, hidden)))
    )
    return ExpertWeights(w1, w2, w3, limit)


@functools.cache
def other_experts(limit: float) -> Case:
    def arguments(count: int):
        chosen = uniform(count, 5, seed=1).argsort(1)[:, :3].int()
        return normal(count, 50) * 4, chosen, normal(count, 3, seed=2)

    return family.case("experts", "prepare_experts", (random_experts(5, 50, 21, limit),), arguments)


@pytest.mark.parametrize("make", [experts, shared, router])
@pytest.mark.parametrize("model", MODELS)
def test_results_are_those_of_the_reference(make, model):
    family.check_against_reference(make(model), LIMIT)


@pytest.mark.parametrize("make", [experts, shared, router])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_has_the_same_bits_alone_and_among_others(make, model):
    family.check_bits(make(model))


def test_threads_that_take_tokens_through_all_experts_give_the_same_bits():
    case = experts("nano")
    arguments = case.arguments(300)
    few = [case.cpu(family.rows(arguments, first, first + 20))[0] for first in range(0, 300, 20)]
    for threads in (1, 2, 3):
        with pair.threads(threads):
            assert torch.equal(case.cpu(arguments)[0], torch.cat(few))


@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_any_width_and_limit(limit):
    family.check_against_reference(other_experts(limit), LIMIT)
    family.check_bits(other_experts(limit))


@pytest.mark.parametrize("changes", [
    {}, {"scoring": "softmax"}, {"scoring": "sigmoid", "normalize": False}, {"num_active": 1}, {"num_active": 13},
    {"temperature": 2.5, "scaling": 0.5},
])  # fmt: skip
def test_any_router_with_image_tokens(changes):
    family.check_against_reference(other_router(**changes), LIMIT)
    family.check_bits(other_router(**changes))


@pytest.mark.parametrize("make", [experts, shared, router])
def test_numbers_may_lie_apart(make):
    family.check_strides(make("golden"))


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_scores_far_from_zero_are_those_of_the_reference(scoring):
    logits = torch.tensor([-300.0, -87.0, -30.0, -16.0, -1.0, 0.0, 1e-3, 4.0, 16.0, 19.999, 20.0, 20.001, 300.0])
    router = RouterWeights(
        Weight(torch.eye(13)), *(Weight(torch.zeros(13)),) * 2, num_active=13, scoring=scoring, normalize=False,
        scaling=1.0, temperature=1.0,
    )  # fmt: skip
    found, expected = (
        ops.route(logits.unsqueeze(0), None, ops.prepare_router(router)) for ops in (pair.cpu(), pair.reference())
    )
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=4e-7, atol=1e-37)


def test_equal_scores_go_to_the_lower_expert():
    tied = replace(
        random_router(num_active=4), weight=Weight(torch.zeros(13, 40).bfloat16()), bias=Weight(torch.zeros(13))
    )
    chosen, _ = pair.cpu().route(normal(3, 40), None, pair.cpu().prepare_router(tied))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


def test_a_token_of_nan_gets_experts_that_exist():
    x = torch.full((2, 40), torch.nan)
    chosen, share = pair.cpu().route(x, None, pair.cpu().prepare_router(random_router()))
    assert ((chosen >= 0) & (chosen < 13)).all()
    assert share.isnan().all()


def test_one_expert_may_get_every_token_or_none():
    case = other_experts(0.0)
    x, _, share = case.arguments(300)
    chosen = torch.tensor([[4, 1, 0]], dtype=torch.int32).expand(300, 3)
    actual, expected = case.cpu((x, chosen, share))[0], case.reference((x, chosen, share))[0]
    assert family.golden.row_error(actual, expected) <= LIMIT


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_tokens_without_experts_get_zeros(count):
    x, none = normal(count, 50), torch.empty(count, 0)
    assert torch.equal(other_experts(0.0).cpu((x, none.int(), none))[0], torch.zeros(count, 50))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("count", [127, 129, 193, 600])
def test_threads_that_take_tokens_of_their_own_give_the_same_bits(count, num_threads):
    case = other_experts(0.0)
    arguments = case.arguments(count)
    expected = torch.cat([case.cpu(family.rows(arguments, token, token + 1))[0] for token in range(count)])
    with pair.threads(num_threads):
        assert torch.equal(case.cpu(arguments)[0], expected)


@pytest.mark.parametrize("expert", [-1, 5, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_refused(expert):
    x, chosen, share = other_experts(0.0).arguments(3)
    chosen[1, 2] = expert
    with pytest.raises(ShapeError, match=f"{expert}; there are 5 experts" if expert > 0 else "from -1"):
        other_experts(0.0).cpu((x, chosen, share))


def test_what_does_not_fit_is_refused():
    x, chosen, share = experts("nano").arguments(3)
    for arguments in (
        (x[:2], chosen, share),
        (x, chosen.long(), share),
        (x, chosen, share[:, :1]),
        (x[:, 1:], chosen, share),
    ):
        with pytest.raises(ShapeError):
            experts("nano").cpu(arguments)
    with pytest.raises(ShapeError, match="softmin"):
        pair.cpu().prepare_router(random_router(scoring="softmin"))
    with pytest.raises(ShapeError, match="num_active is 14"):
        pair.cpu().prepare_router(random_router(num_active=14))
    good = random_experts(2, 32, 16, 0.0)
    with pytest.raises(ShapeError, match="twice"):
        pair.cpu().prepare_experts(replace(good, w2=pair.random_weight(2, 32, 8, seed=0)))
