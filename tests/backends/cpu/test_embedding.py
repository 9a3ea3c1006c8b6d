"""embed and head against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import functools

import pytest
import torch

from backends.cpu import family, pair
from backends.cpu.family import MODELS, Case, integers, normal, uniform
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import HeadWeights, Weight
from model_configs import config

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 2e-6  # float32 sums in another order


@functools.cache
def embed(model: str) -> Case:
    return family.case(
        "embed",
        "prepare_embedding",
        (family.weights(model).embedding(), config(model).num_streams),
        lambda n: (integers(config(model).vocab_size, n),),
    )


@functools.cache
def head(model: str) -> Case:
    sizes = config(model)

    def arguments(count: int):
        return normal(count, sizes.num_streams, sizes.hidden_size), uniform(count, sizes.num_streams, seed=1)

    return family.case("head", "prepare_head", (family.weights(model).head(),), arguments)


@pytest.mark.parametrize("make", [embed, head])
@pytest.mark.parametrize("model", MODELS)
def test_results_are_those_of_the_reference(make, model):
    family.check_against_reference(make(model), 0.0 if make is embed else LIMIT)


@pytest.mark.parametrize("make", [embed, head])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_has_the_same_bits_alone_and_among_others(make, model):
    family.check_bits(make(model))


@pytest.mark.parametrize("make", [embed, head])
def test_numbers_may_lie_apart(make):
    family.check_strides(make("golden"))


@pytest.mark.parametrize("token", [-1, 4096, 2**40])
def test_a_token_outside_of_the_table_is_refused(token):
    with pytest.raises(ShapeError, match="below 4096"):
        embed("nano").cpu((torch.tensor([3, token]),))


def test_what_does_not_fit_is_refused():
    streams, pre = head("nano").arguments(3)
    for arguments in ((streams[:, :, 1:], pre), (streams, pre[:, :2]), (streams, pre.double())):
        with pytest.raises(ShapeError):
            head("nano").cpu(arguments)
    with pytest.raises(ShapeError, match="head norm"):
        pair.cpu().prepare_head(HeadWeights(pair.random_norm(31, 0), pair.random_weight(50, 32, seed=1)))
    with pytest.raises(ShapeError, match="embedding"):
        pair.cpu().prepare_embedding(Weight(normal(5, 4)), 2)


@pytest.mark.parametrize(("shape", "problem"), [((3, 7), "logits"), (None, "the memory for logits must be contiguous")])
def test_memory_for_logits_that_cannot_take_them_is_refused(shape, problem):
    case = head("golden")
    streams, pre = case.arguments(3)
    prepared = case.prepared()[1]
    vocabulary = len(pair.cpu().head(streams, pre, prepared, None)[0])
    out = torch.empty(3, 2 * vocabulary)[:, ::2] if shape is None else torch.empty(shape)
    with pytest.raises(ShapeError, match=problem):
        pair.cpu().head(streams, pre, prepared, out)
    kept = torch.empty(3, vocabulary)
    assert pair.cpu().head(streams, pre, prepared, kept) is kept
