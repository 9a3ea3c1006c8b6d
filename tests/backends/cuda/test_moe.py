"""Router, experts and the shared expert against the reference, and in any batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backends.cuda import packed, pair
from deepinfer.backends.cuda.hopper import linear, moe
from deepinfer.backends.cuda.hopper.experts import expert_matmul, prepare_stack
from deepinfer.backends.cuda.hopper.quant import quantise
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import ExpertWeights, Weight
from ops import golden

LIMIT = 2e-2  # a last bit may round an input to fp8 the other way


def inputs(tokens: int, width: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_of(experts: int, inner: int, hidden: int, spread: int = 2, limit: float = 2.0) -> ExpertWeights:
    random = torch.Generator().manual_seed(4)

    def stack(rows: int, width: int) -> Weight:
        codes = torch.randint(0, 256, (experts, rows, width // 2), generator=random, dtype=torch.uint8).view(torch.int8)
        scale = torch.randint(122 - spread, 123, (experts, rows, width // 32), generator=random, dtype=torch.uint8)
        return Weight(codes, scale.view(torch.float8_e8m0fnu))

    return ExpertWeights(stack(inner, hidden), stack(hidden, inner), stack(inner, hidden), limit)


def both(weights: ExpertWeights, x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor):
    ours, theirs = pair.hopper(), pair.reference()
    prepared = ours.prepare_experts(pair.placed(weights))
    actual = ours.experts(pair.narrow(x), pair.placed(chosen), pair.placed(share), prepared)
    return pair.wide(actual), theirs.experts(x.float(), chosen, share, theirs.prepare_experts(weights))


@pytest.mark.parametrize("width", [16, 4096])  # of which a piece of the router's width is a multiple: four, or one
@pytest.mark.parametrize(("scoring", "normalize"), [("sqrtsoftplus", True), ("softmax", False), ("sigmoid", True)])
def test_choices_and_shares_equal_the_reference(scoring, normalize, width, monkeypatch):
    monkeypatch.setattr(linear, "PIECE_WIDTH", width)
    router = dataclasses.replace(golden.router(4), scoring=scoring, normalize=normalize, temperature=1.5)
    x, is_image = inputs(9), torch.arange(9) % 4 == 0
    ours, theirs = pair.hopper(), pair.reference()
    for images in (None, is_image):
        given = None if images is None else pair.placed(images)
        chosen, share = ours.route(pair.narrow(x), given, ours.prepare_router(pair.placed(router)))
        expected, expected_share = theirs.route(x.float(), images, theirs.prepare_router(router))
        assert torch.equal(chosen.cpu(), expected.int())
        torch.testing.assert_close(share.cpu(), expected_share, rtol=1e-5, atol=1e-7)  # fast exp and log


@pytest.mark.parametrize(("experts", "inner", "hidden", "spread"), [(3, 64, 96, 2), (5, 32, 160, 11), (1, 128, 32, 0)])
def test_experts_equal_the_reference(experts, inner, hidden, spread):
    x = inputs(6, hidden)
    k = min(2, experts)
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(n))[:k] for n in range(6)]
    ).int()
    share = torch.rand(6, k, generator=torch.Generator().manual_seed(0)) + 0.1
    actual, expected = both(weights_of(experts, inner, hidden, spread), x, chosen, share)
    limit = 0.05 if inner == 32 else LIMIT  # one group alone: one number that rounds to another fp8 counts for 0.04
    assert golden.row_error(actual, expected) <= limit


on_host = pytest.mark.skipif(pair.DEVICE.type != "cpu", reason="a card packs matrices anyway")


@pytest.fixture
def packs(monkeypatch):
    """Every matrix is packed, though no card multiplies it."""
    for module in ("moe", "matrices"):
        monkeypatch.setattr(f"deepinfer.backends.cuda.hopper.{module}.can_pack", lambda *given: True)
    for module in ("moe", "linear"):
        monkeypatch.setattr(f"deepinfer.backends.cuda.hopper.{module}.products", packed.products)


@on_host
@pytest.mark.parametrize(("experts", "inner", "hidden"), [(3, 64, 96), (5, 32, 160), (1, 128, 32)])
@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_packed_experts_equal_the_reference(packs, experts, inner, hidden, limit):
    random, k = torch.Generator().manual_seed(0), min(2, experts)
    chosen = torch.stack([torch.randperm(experts, generator=random)[:k] for _ in range(11)]).int()
    weights = weights_of(experts, inner, hidden, limit=limit)
    actual, expected = both(weights, inputs(11, hidden), chosen, torch.rand(11, k, generator=random) + 0.1)
    assert golden.row_error(actual, expected) <= LIMIT


@on_host
@pytest.mark.parametrize("missing_bytes", [0, 2])
def test_experts_are_kept_as_e4m3_too_where_a_layers_copies_have_room(packs, missing_bytes, monkeypatch):
    copied = 3 * (2 + 2) * 2 * 2 * 8192  # bytes: experts, tiles of 128 rows of both, steps, groups
    monkeypatch.setattr("deepinfer.ops.expert_copies.COPY_SHARE", 0.5)
    monkeypatch.setattr(moe, "memory_bytes", lambda device: 2 * copied - missing_bytes)
    monkeypatch.setattr(moe, "widened", lambda chunks: chunks + 1)
    prepared = moe.prepare_experts(weights_of(3, 64, 96))
    for matrix in (prepared.gate_up, prepared.down):
        assert matrix.chunks[..., 0].numel() * 8192 == copied / 2
        assert torch.equal(matrix.copy, matrix.chunks + 1) if not missing_bytes else matrix.copy is None


def test_groups_more_than_eleven_octaves_below_their_row_are_rounded():
    weights = weights_of(2, 32, 64, 0)
    for stack in (weights.w1, weights.w2, weights.w3):
        stack.scale.view(torch.uint8)[..., 0] -= 13
    actual, expected = both(weights, inputs(3, 64), torch.tensor([[0], [1], [0]], dtype=torch.int32), torch.ones(3, 1))
    assert golden.row_error(actual, expected) <= LIMIT


@pytest.mark.parametrize("num_tokens", [5, 70])  # small and larger tiles
def test_long_sums_of_one_sign_are_not_cut_off(num_tokens):
    """The matrix unit's own sums drop the lowest bits of every addend, and so come out short."""
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(1, 8, (1, 64, 4096), generator=random, dtype=torch.uint8)  # positive e2m1
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int8)
    weight = Weight(packed, torch.full((1, 64, 128), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    x = torch.rand(num_tokens, 4096, generator=random).add(0.5).bfloat16()
    rows = quantise(pair.narrow(x))
    order = torch.arange(num_tokens, dtype=torch.int32, device=pair.DEVICE)
    ends = torch.tensor([num_tokens], dtype=torch.int32, device=pair.DEVICE)
    actual = pair.wide(expert_matmul(rows, prepare_stack(pair.placed(weight)), order, ends, 1))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)[codes[0].long()]
    inputs_ = rows.values.cpu().double() * rows.scale.cpu().double()[:, None]
    expected = inputs_ @ values.T
    assert abs(float((actual.double() / expected).mean()) - 1) < 3e-4  # roundings to bf16 cancel, cut bits add up


@pair.on_device
@pytest.mark.parametrize("num_tokens", [3, 40, 120, 400, 1300])  # as many tile sizes
def test_a_token_has_the_same_bits_alone_and_among_many(num_tokens):
    weights, x, share = weights_of(3, 160, 384), inputs(num_tokens, 384), torch.ones(num_tokens, 2)  # several steps
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0]], dtype=torch.int32).repeat(-(-num_tokens // 4), 1)
    chosen = chosen[:num_tokens]
    together, _ = both(weights, x, chosen, share)
    for token in (0, num_tokens // 2, num_tokens - 1):
        part = slice(token, token + 1)
        assert torch.equal(both(weights, x[part], chosen[part], share[part])[0], together[part])


def test_the_shared_expert_equals_the_reference():
    ours, theirs, weights = pair.hopper(), pair.reference(), golden.shared_expert(4)
    x, routed = inputs(5), torch.randn(5, 128)
    actual = ours.shared_expert(pair.narrow(x), pair.placed(routed), ours.prepare_shared_expert(pair.placed(weights)))
    expected = theirs.shared_expert(x.float(), routed, theirs.prepare_shared_expert(weights))
    assert golden.row_error(pair.wide(actual), expected) <= LIMIT


@on_host
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_a_packed_shared_expert_equals_the_reference(packs, tokens):
    ours, theirs, weights = pair.hopper(), pair.reference(), golden.shared_expert(4)
    x, routed = inputs(tokens), torch.randn(tokens, 128)
    actual = ours.shared_expert(pair.narrow(x), routed, ours.prepare_shared_expert(weights))
    expected = theirs.shared_expert(x.float(), routed, theirs.prepare_shared_expert(weights))
    assert actual.shape == expected.shape
    assert tokens == 0 or golden.row_error(pair.wide(actual), expected) <= LIMIT


def run_experts(tokens: int):
    """A call of `run_experts` and its arguments."""
    ours, random = pair.hopper(), torch.Generator().manual_seed(0)
    experts = ours.prepare_experts(pair.placed(golden.experts(4)))
    shared = ours.prepare_shared_expert(pair.placed(golden.shared_expert(4)))
    chosen = torch.randint(0, golden.experts(4).w1.value.shape[0], (tokens, 2), generator=random).int()
    share = torch.rand(tokens, 2, generator=random)
    return ours, (pair.narrow(inputs(tokens)), pair.placed(chosen), pair.placed(share), experts, shared)


def test_experts_and_the_shared_one_together_have_the_bits_of_one_after_the_other():
    for tokens in (0, 7):
        ours, (x, chosen, share, experts, shared) = run_experts(tokens)
        together = ours.run_experts(x, chosen, share, experts, shared)
        assert torch.equal(together, ours.shared_expert(x, ours.experts(x, chosen, share, experts), shared))


@pair.on_device
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_captured_experts_beside_the_shared_one_have_the_bits_of_eager_ones(tokens):
    ours, given = run_experts(tokens)
    expected, graph = ours.run_experts(*given), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):  # memory of one is used again by the next
            found = ours.run_experts(*given)
    for _ in range(10):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


def test_no_tokens_give_no_rows_and_plain_weights_are_refused():
    actual, expected = both(
        weights_of(2, 32, 64), inputs(0, 64), torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1)
    )
    assert actual.shape == expected.shape == (0, 64)
    plain = Weight(torch.zeros(2, 32, 64, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="e2m1"):
        pair.hopper().prepare_experts(ExpertWeights(plain, plain, plain, 0.0))
