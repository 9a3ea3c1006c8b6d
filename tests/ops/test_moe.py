"""route, experts, shared_expert."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import moe
from deepinfer.ops.weights import ExpertWeights, RouterWeights, Weight
from ops import golden


@pytest.mark.parametrize(("length", "precision"), [*golden.TRACES, (33, "fast")])
def test_router_choices_and_shares_equal_the_oracle(length, precision):
    trace = golden.trace(length, "float32" if precision == "fast" else precision)
    for layer in range(8):
        name = f"layers.{layer}.ffn"
        ops = golden.ops(precision)
        chosen, share = ops.route(trace[f"{name}.input"], None, ops.prepare_router(golden.router(layer)))
        assert chosen.dtype == torch.int32
        is_clear = trace[f"{name}.gate.margin"] > 1e-6  # the error of a float32 score near 1
        assert is_clear.float().mean() > 0.99
        assert torch.equal(chosen[is_clear], trace[f"{name}.gate.chosen"][is_clear])
        assert golden.row_error(share[is_clear], trace[f"{name}.gate.share"][is_clear]) <= 1e-6


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_expert_half_equals_the_oracle(length, precision):
    trace, ops = golden.trace(length, precision), golden.ops(precision)
    for layer in range(8):
        name = f"layers.{layer}.ffn"
        x, chosen, share = (trace[f"{name}.{part}"] for part in ("input", "gate.chosen", "gate.share"))
        routed = ops.experts(x, chosen, share, ops.prepare_experts(golden.experts(layer)))
        output = ops.shared_expert(x, routed, ops.prepare_shared_expert(golden.shared_expert(layer)))
        # exact: routed sums in float64 against float32, so a value may round to the next bf16
        assert golden.row_error(output, trace[f"{name}.output"]) <= (1e-3 if precision == "exact" else 1e-6)


def test_fast_experts_stay_close_to_the_exact_oracle():
    trace, ops = golden.trace(33, "exact"), golden.ops("fast")
    x, chosen, share = (trace[f"layers.0.ffn.{part}"] for part in ("input", "gate.chosen", "gate.share"))
    routed = ops.experts(x, chosen, share, ops.prepare_experts(golden.experts(0)))
    output = ops.shared_expert(x, routed, ops.prepare_shared_expert(golden.shared_expert(0)))
    expected = trace["layers.0.ffn.output"]
    errors = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Both round the inputs of products to fp8. Exact also rounds every result to bf16, and where that
    # carries a value across a border of fp8 it moves by up to 2^-4. Without fp8 inputs the median is 4.5e-2.
    assert errors.median() <= 2e-2 and errors.max() <= 6e-2


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_experts_that_stay_packed_give_the_same_bits(monkeypatch, precision):
    ops, weights = golden.ops(precision), golden.experts(2)
    wide = ops.prepare_experts(weights)
    monkeypatch.setattr(moe, "WIDEN_LIMIT_BYTES", 0)
    packed = ops.prepare_experts(weights)
    assert packed.wide_down is None
    assert packed.stored.w1.value is weights.w1.value
    x, chosen, share = random_routing(tokens=9, seed=0)
    assert torch.equal(ops.experts(x, chosen, share, packed), ops.experts(x, chosen, share, wide))


def random_routing(tokens: int, seed: int, k: int = 3):
    random = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(8, generator=random)[:k] for _ in range(tokens)]).int()
    return torch.randn(tokens, 128, generator=random), chosen, torch.rand(tokens, k, generator=random)


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_token_does_not_depend_on_the_tokens_beside_it(monkeypatch, precision):
    ops = golden.ops(precision)
    experts = ops.prepare_experts(golden.experts(5))
    x, chosen, share = random_routing(tokens=21, seed=1)
    together = ops.experts(x, chosen, share, experts)
    alone = [ops.experts(x[t : t + 1], chosen[t : t + 1], share[t : t + 1], experts) for t in range(21)]
    assert torch.equal(together, torch.cat(alone))
    monkeypatch.setattr(moe, "TILE_BYTES", 4 * 3 * (2 * 128 + 3 * 64) * 8)  # 4 tokens a tile
    assert torch.equal(ops.experts(x, chosen, share, experts), together)


def test_an_expert_chosen_twice_by_one_token_counts_twice():
    ops = golden.ops("float32")
    experts = ops.prepare_experts(golden.experts(0))
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    once = ops.experts(x, torch.tensor([[4]]), torch.tensor([[0.5]]), experts)
    twice = ops.experts(x, torch.tensor([[4, 4]]), torch.tensor([[0.5, 0.5]]), experts)
    assert torch.allclose(twice, 2 * once, rtol=1e-6)


def test_no_tokens_give_no_rows():
    ops = golden.ops("exact")
    x, none = torch.empty(0, 128), torch.empty(0, 2)
    chosen, share = ops.route(x, None, ops.prepare_router(golden.router(0)))
    assert (chosen.shape, share.shape) == ((0, 2), (0, 2))
    routed = ops.experts(x, none.int(), none, ops.prepare_experts(golden.experts(0)))
    assert ops.shared_expert(x, routed, ops.prepare_shared_expert(golden.shared_expert(0))).shape == (0, 128)


def small_router(**changes) -> RouterWeights:
    router = RouterWeights(
        weight=Weight(torch.eye(5, 6, dtype=torch.bfloat16)),
        bias=Weight(torch.zeros(5)),
        bias_vl=Weight(torch.tensor([0.0, 0.0, 0.0, 9.0, 8.0])),
        num_active=2,
        scoring="sqrtsoftplus",
        normalize=True,
        scaling=1.5,
        temperature=1.0,
    )
    return dataclasses.replace(router, **changes)


def test_equal_scores_go_to_the_lower_expert_and_images_have_their_own_bias():
    ops = golden.ops("float32")
    router = ops.prepare_router(small_router())
    x = torch.zeros(3, 6)
    x[1, 4] = 1.0
    chosen, share = ops.route(x, None, router)
    assert chosen.tolist() == [[0, 1], [4, 0], [0, 1]]
    assert torch.allclose(share.sum(-1), torch.full((3,), 1.5))
    chosen, _ = ops.route(x, torch.tensor([False, False, True]), router)
    assert chosen.tolist() == [[0, 1], [4, 0], [3, 4]]


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_scoring_follows_its_formula(scoring, normalize):
    ops = golden.ops("float32")
    router = ops.prepare_router(small_router(scoring=scoring, normalize=normalize, temperature=0.7))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    chosen, share = ops.route(x, None, router)
    logits = x[:, :5] / 0.7
    formula = {
        "sqrtsoftplus": (1 + logits.exp()).log().sqrt(),
        "softmax": logits.exp() / logits.exp().sum(-1, keepdim=True),
        "sigmoid": 1 / (1 + (-logits).exp()),
    }[scoring]
    best, order = formula.topk(2)
    expected = best / best.sum(-1, keepdim=True) if normalize else best
    assert torch.equal(chosen.long(), order)
    assert torch.allclose(share, expected * 1.5, rtol=1e-5)
    with pytest.raises(ShapeError, match="'tanh'; it must be one of sqrtsoftplus, softmax, sigmoid"):
        ops.prepare_router(small_router(scoring="tanh"))


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_the_clamp_applies_above_zero_only(limit):
    ops, weights = golden.ops("float32"), dataclasses.replace(golden.shared_expert(1), limit=limit)
    x = 5 * torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    w1, w2, w3 = (oracle.dequantize(w.value, w.scale) for w in (weights.w1, weights.w2, weights.w3))
    gate, up = oracle.matmul(x, w1), oracle.matmul(x, w3)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = 1 + oracle.matmul(torch.nn.functional.silu(gate) * up, w2)
    actual = ops.shared_expert(x, torch.ones(3, 128), ops.prepare_shared_expert(weights))
    assert golden.row_error(actual, expected) <= 1e-6


def test_unquantised_experts_of_any_width_are_accepted():
    random = torch.Generator().manual_seed(5)
    shapes = ((3, 7, 10), (3, 10, 7), (3, 7, 10))
    weights = ExpertWeights(*(Weight(torch.randn(*shape, generator=random)) for shape in shapes), limit=0.0)
    ops, x = golden.ops("exact"), oracle.bf16(torch.randn(2, 10, generator=random))
    routed = ops.experts(x, torch.tensor([[2], [0]]), torch.ones(2, 1), ops.prepare_experts(weights))
    for token, expert in enumerate((2, 0)):
        w1, w2, w3 = (w.value[expert] for w in (weights.w1, weights.w2, weights.w3))
        hidden = torch.nn.functional.silu(oracle.bf16(oracle.matmul(x, w1))) * oracle.bf16(oracle.matmul(x, w3))
        expected = oracle.matmul(oracle.bf16(hidden), w2)
        assert golden.row_error(routed[token : token + 1], expected[token : token + 1]) <= 4e-3


def test_wrong_shapes_are_refused_by_name():
    ops = golden.ops("fast")
    experts = ops.prepare_experts(golden.experts(0))
    x, chosen, share = random_routing(tokens=2, seed=6)
    with pytest.raises(ShapeError, match="x has shape"):
        ops.experts(x[:, :64], chosen, share, experts)
    with pytest.raises(ShapeError, match="share has shape"):
        ops.experts(x, chosen, share[:, :1], experts)
