"""Router, routed experts and the shared expert.

No sum of the routed experts crosses pairs but the last one, which goes in order of choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.beside import beside
from deepinfer.backends.cuda.hopper.experts import Stack, expert_matmul, ordered, prepare_stack
from deepinfer.backends.cuda.hopper.linear import linear, linear_in_pieces
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.numbers import to_bf16
from deepinfer.backends.cuda.hopper.panels import Panels, Places, places_of, quantise_panels
from deepinfer.backends.cuda.hopper.products import Packed, can_pack, pack_e2m1, products, widened
from deepinfer.backends.cuda.hopper.quant import Rows, quantise
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.backends.cuda.hopper.swiglu import swiglu, swiglu_panels
from deepinfer.backends.cuda.native import memory_bytes
from deepinfer.ops.expert_copies import copy_bytes
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import ExpertWeights, RouterWeights

SCORINGS = ("sqrtsoftplus", "softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """Router weights: bias, bias_vl [E] float32."""

    matrix: Matrix
    bias: Tensor
    bias_vl: Tensor
    num_active: int
    scoring: int
    normalize: bool
    scaling: float
    temperature: float


@dataclass(frozen=True)
class Experts:
    """Routed experts: w1 above w3, and w2; packed for CUDA C++, or as Triton's kernel takes them."""

    gate_up: Stack | Packed
    down: Stack | Packed
    limit: float


# Rounded tokens and where each expert's lie: places in panels, or the order of pairs and where each expert's end.
ByExpert = tuple[Panels, Places] | tuple[Rows, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SharedExpert:
    """The shared expert: w1 above w3, and w2."""

    gate_up: Matrix
    down: Matrix
    limit: float


def prepare_router(router: RouterWeights) -> Router:
    """Pack the weights. Raises ShapeError for a scoring that does not exist."""
    require(
        router.scoring in SCORINGS, f"router scoring is {router.scoring!r}; it must be one of {', '.join(SCORINGS)}"
    )
    bias, bias_vl = router.bias.value.float().contiguous(), router.bias_vl.value.float().contiguous()
    return Router(
        prepare_matrix(router.weight, dtype=torch.float32), bias, bias_vl, router.num_active,
        SCORINGS.index(router.scoring), router.normalize, router.scaling, router.temperature,
    )  # fmt: skip


@triton.jit
def route_kernel(
    logits, bias, bias_vl, is_image, chosen, share, num_tokens, scaling, temperature,
    PIECES: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, ACTIVE: tl.constexpr, ACTIVE_TILE: tl.constexpr,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, HAS_IMAGES: tl.constexpr,
):  # fmt: skip
    """One token's choice, by the sum of the logits of all pieces of its width."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE)
    is_expert = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=is_expert, other=-float("inf"))
    for piece in tl.static_range(1, PIECES):
        logit += tl.load(logits + (piece * num_tokens + token) * EXPERTS + expert, mask=is_expert, other=0.0)
    logit = logit / temperature
    if SCORING == 0:
        grown = tl.exp(-tl.abs(logit))
        shifted = 1.0 + grown  # log1p without its cancellation (Goldberg, 1991)
        small = tl.where(shifted == 1.0, grown, tl.log(shifted) * (grown / (shifted - 1.0)))
        score = tl.sqrt(tl.maximum(logit, 0.0) + small)
    elif SCORING == 1:
        grown = tl.exp(logit - tl.max(logit))
        score = grown / tl.sum(grown)
    else:
        score = tl.sigmoid(logit)
    added = tl.load(bias + expert, mask=is_expert, other=0.0)
    if HAS_IMAGES:
        added = tl.where(tl.load(is_image + token) != 0, tl.load(bias_vl + expert, mask=is_expert, other=0.0), added)
    ranking = tl.where(is_expert, score + added, -float("inf"))
    total = 0.0
    places = tl.arange(0, ACTIVE_TILE)
    picks, values = tl.zeros([ACTIVE_TILE], tl.int32), tl.zeros([ACTIVE_TILE], tl.float32)
    for place in tl.static_range(ACTIVE):
        best = tl.max(ranking)
        pick = tl.min(tl.where(ranking == best, expert, TILE))
        pick = tl.where(pick < EXPERTS, pick, place)
        value = tl.sum(tl.where(expert == pick, score, 0.0))
        total += value
        ranking = tl.where(expert == pick, -float("inf"), ranking)
        picks, values = tl.where(places == place, pick, picks), tl.where(places == place, value, values)
    if NORMALIZE:
        values = values / (total + 1e-20)
    tl.store(chosen + token * ACTIVE + places, picks, mask=places < ACTIVE)
    tl.store(share + token * ACTIVE + places, values * scaling, mask=places < ACTIVE)


def route(x: Tensor, is_image: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """Choose experts: (chosen [T, k] int32 best first, share [T, k] float32) of x [T, H] bf16."""
    expect("x", x, (None, None), torch.bfloat16)
    num_tokens, num_experts, k = len(x), len(router.bias), router.num_active
    if is_image is not None:
        expect("is_image", is_image, (num_tokens,), torch.bool)
    logits = linear_in_pieces(x, router.matrix)
    chosen = torch.empty(num_tokens, k, dtype=torch.int32, device=x.device)
    share = torch.empty(num_tokens, k, device=x.device)
    if num_tokens:
        images = is_image.contiguous().view(torch.uint8) if is_image is not None else chosen
        route_kernel[(num_tokens,)](
            logits, router.bias, router.bias_vl, images, chosen, share, num_tokens, router.scaling, router.temperature,
            len(logits), num_experts, next_power_of_2(num_experts), k, next_power_of_2(k), router.scoring,
            router.normalize, is_image is not None, num_warps=1, launch_pdl=True,
        )  # fmt: skip
    return chosen, share


def prepare_experts(experts: ExpertWeights) -> Experts:
    """Pack routed experts, and keep them as e4m3 too if a layer's copies fit; w1 and w3 become one product."""
    w1, w3, down = prepare_stack(experts.w1), prepare_stack(experts.w3), prepare_stack(experts.w2)
    gate_up = Stack(
        torch.cat([w1.codes, w3.codes], dim=1), torch.cat([w1.shifts, w3.shifts], dim=1),
        torch.cat([w1.scale, w3.scale], dim=1), w1.width,
    )  # fmt: skip
    stacks = gate_up, down
    if not all(can_pack(stack.num_rows, len(stack.codes), stack.codes.device) for stack in stacks):
        return Experts(gate_up, down, experts.limit)
    packed = [pack_e2m1(stack) for stack in stacks]
    sizes = len(down.codes), gate_up.width, down.width
    if copy_bytes(*sizes, memory_bytes(gate_up.codes.device)):
        packed = [matrix._replace(copy=widened(matrix.chunks)) for matrix in packed]
    return Experts(packed[0], packed[1], experts.limit)


@triton.jit
def combine_kernel(
    pairs, of_pairs, own, out, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, TILE: tl.constexpr,
    HAS_PLACES: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Sum of a token's pairs in their order and, if it has one, of its shared expert, which is rounded to bf16."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = token * WIDTH + column
    total = tl.zeros([TILE], tl.float32)
    for active in tl.static_range(ACTIVE):
        pair = token * ACTIVE + active
        if HAS_PLACES:
            pair = tl.load(of_pairs + pair).to(tl.int64)
        total += tl.load(pairs + pair * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if HAS_OWN:
        total = to_bf16(total + tl.load(own + at, mask=column < WIDTH, other=0.0).to(tl.float32))
    tl.store(out + at, total, mask=column < WIDTH)


def experts(x: Tensor, chosen: Tensor, share: Tensor, experts: Experts) -> Tensor:
    """Sum over the chosen experts, best first: x [T, H] bf16, chosen and share [T, k] -> [T, H] float32."""
    return _combined(*_pairs(_by_expert(x, chosen, share, experts), share, experts), share.shape, None)


def run_experts(x: Tensor, chosen: Tensor, share: Tensor, experts: Experts, shared_expert: SharedExpert) -> Tensor:
    """Routed experts and, beside them, the shared one: x [T, H] bf16, chosen and share [T, k] -> [T, H] bf16."""
    tokens = _by_expert(x, chosen, share, experts)
    own = beside(lambda: _own(x, shared_expert))
    pairs, of_pairs = _pairs(tokens, share, experts)
    return _combined(pairs, of_pairs, share.shape, own())


def _by_expert(x: Tensor, chosen: Tensor, share: Tensor, experts: Experts) -> ByExpert:
    """Rounded tokens, and where those of each expert lie."""
    expect("x", x, (None, experts.gate_up.width), torch.bfloat16)
    expect("chosen", chosen, (len(x), None), torch.int32)
    expect("share", share, tuple(chosen.shape), torch.float32)
    chosen = chosen.contiguous()
    if isinstance(experts.gate_up, Packed):
        places = places_of(chosen, len(experts.gate_up.chunks))
        return quantise_panels(x, experts.gate_up.padded_width, places), places
    return quantise(x), ordered(chosen, len(experts.gate_up.codes))


def _pairs(tokens: ByExpert, share: Tensor, experts: Experts) -> tuple[Tensor, Tensor | None]:
    """What each chosen expert adds [pairs, H] bf16, and the places of [T * k] pairs there, None = in their order."""
    share, (rows, places), (gate_up, down) = share.contiguous(), tokens, (experts.gate_up, experts.down)
    if isinstance(places, Places):
        assert isinstance(rows, Panels) and isinstance(gate_up, Packed) and isinstance(down, Packed)
        both = products(rows, gate_up, places)
        inner = swiglu_panels(both, share, experts.limit, down.padded_width, places)
        return products(inner, down, places), places.of_pairs
    assert isinstance(rows, Rows) and isinstance(gate_up, Stack) and isinstance(down, Stack)
    both = expert_matmul(rows, gate_up, *places, share.shape[1])
    return expert_matmul(swiglu(both, share, experts.limit), down, *places, 1), None


def _combined(pairs: Tensor, of_pairs: Tensor | None, shape: torch.Size, own: Tensor | None) -> Tensor:
    """Sums of pairs [n, H] by token [T, H] float32, or with `own` [T, H] bf16 as bf16; shape: [T, k]."""
    (num_tokens, k), width = shape, pairs.shape[1]
    out = pairs.new_empty(num_tokens, width, dtype=torch.float32 if own is None else torch.bfloat16)
    tile = min(1024, next_power_of_2(width))
    if num_tokens:
        combine_kernel[(num_tokens, cdiv(width, tile))](
            pairs, pairs if of_pairs is None else of_pairs, pairs if own is None else own, out,
            width, k, tile, of_pairs is not None, own is not None, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out


def prepare_shared_expert(expert: ExpertWeights) -> SharedExpert:
    """w1 and w3 become one product. Raises ShapeError for weights that are not quantised."""
    require(expert.w1.is_quantized and expert.w2.is_quantized, "the shared expert is e4m3")
    return SharedExpert(prepare_matrix(expert.w1, expert.w3), prepare_matrix(expert.w2), expert.limit)


def shared_expert(x: Tensor, routed: Tensor, expert: SharedExpert) -> Tensor:
    """routed + w2(swiglu(w1 x, w3 x)): x [T, H] bf16, routed [T, H] float32 -> [T, H] bf16."""
    expect("x", x, (None, None), torch.bfloat16)
    expect("routed", routed, tuple(x.shape), torch.float32)
    return _combined(routed.contiguous(), None, torch.Size((len(x), 1)), _own(x, expert))


def _own(x: Tensor, expert: SharedExpert) -> Tensor:
    """What the shared expert adds [T, H] bf16."""
    both, down = linear(x, expert.gate_up), expert.down
    if isinstance(down.rows, Packed):
        return linear(swiglu_panels(both, None, expert.limit, down.rows.padded_width), down)
    return linear(swiglu(both, None, expert.limit), down)
