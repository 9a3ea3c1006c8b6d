"""Router, routed experts and the shared expert.

Routed experts are widened once while a layer's widened stack stays below `WIDEN_LIMIT_BYTES`;
larger stacks stay packed, with the expert as first dimension, and each expert that a step chose is
widened for that step only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.linear import (
    WIDEN_LIMIT_BYTES,
    Linear,
    linear,
    multiply,
    num_columns,
    prepare_linear,
    wide_bytes,
)
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import ExpertWeights, RouterWeights, Weight

TILE_BYTES = 256 << 20  # intermediate values of the (token, expert) pairs worked on at a time

SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Router:
    """Router weights: bias, bias_vl [E] float32."""

    matrix: Linear
    bias: Tensor
    bias_vl: Tensor
    num_active: int
    scoring: str
    normalize: bool
    scaling: float
    temperature: float


@dataclass(frozen=True)
class Experts:
    """Routed experts: `stored` as given, or widened in two stacks, of which these are the experts' views.

    wide_gate_up: w1 above w3, E of [2 * inner, H]; wide_down: w2, E of [H, inner].
    """

    stored: ExpertWeights
    wide_gate_up: tuple[Tensor, ...] | None = None
    wide_down: tuple[Tensor, ...] | None = None

    def gate_up(self, numerics: Numerics, expert: int) -> Tensor:
        """w1 above w3 of one expert, [2 * inner, H] in the accumulation dtype."""
        if self.wide_gate_up is not None:
            return self.wide_gate_up[expert]
        parts = (_one(stack, expert) for stack in (self.stored.w1, self.stored.w3))
        return torch.cat([quant.dequantise(part, numerics.accumulate) for part in parts])

    def down(self, numerics: Numerics, expert: int) -> Tensor:
        """w2 of one expert, [H, inner] in the accumulation dtype."""
        if self.wide_down is not None:
            return self.wide_down[expert]
        return quant.dequantise(_one(self.stored.w2, expert), numerics.accumulate)


@dataclass(frozen=True)
class SharedExpert:
    """The shared expert: w1 above w3, and w2."""

    gate_up: Linear
    down: Linear
    limit: float


def prepare_router(numerics: Numerics, router: RouterWeights) -> Router:
    """Widen the weights. Raises ShapeError for a scoring that does not exist."""
    require(router.scoring in SCORING, f"router scoring is {router.scoring!r}; it must be one of {', '.join(SCORING)}")
    return Router(
        matrix=prepare_linear(numerics, router.weight),
        bias=router.bias.value.float(),
        bias_vl=router.bias_vl.value.float(),
        num_active=router.num_active,
        scoring=router.scoring,
        normalize=router.normalize,
        scaling=router.scaling,
        temperature=router.temperature,
    )


def route(numerics: Numerics, x: Tensor, is_image: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """Choose experts for x [T, H]: (chosen [T, k] int32 best first, share [T, k] float32)."""
    expect("x", x, (None, None), torch.float32)
    logits = multiply(numerics, x, router.matrix) / router.temperature
    scores = SCORING[router.scoring](logits)
    bias = router.bias
    if is_image is not None:
        expect("is_image", is_image, (x.shape[0],), torch.bool)
        bias = torch.where(is_image.unsqueeze(-1), router.bias_vl, bias)
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices  # ties to the lower expert
    chosen = order[:, : router.num_active]
    share = scores.gather(-1, chosen)
    if router.normalize and router.num_active > 1:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    return chosen.int(), share * router.scaling


def prepare_experts(numerics: Numerics, experts: ExpertWeights) -> Experts:
    """Widen the stack if it is small enough."""
    stacks = (experts.w1, experts.w2, experts.w3)
    if sum(wide_bytes(numerics, stack) for stack in stacks) > WIDEN_LIMIT_BYTES:
        return Experts(experts)
    w1, w2, w3 = (quant.dequantise(stack, numerics.accumulate) for stack in stacks)
    return Experts(experts, torch.cat([w1, w3], dim=1).unbind(0), w2.unbind(0))


def experts(numerics: Numerics, x: Tensor, chosen: Tensor, share: Tensor, experts: Experts) -> Tensor:
    """Sum over the chosen experts, best first: x [T, H], chosen and share [T, k] -> [T, H] float32."""
    expect("x", x, (None, num_columns(experts.stored.w1)), torch.float32)
    expect("chosen", chosen, (x.shape[0], None))
    expect("share", share, tuple(chosen.shape), torch.float32)
    inner = num_columns(experts.stored.w2)
    width = 2 * x.shape[1] + 3 * inner
    tile = max(1, TILE_BYTES // (max(1, chosen.shape[1]) * width * numerics.accumulate.itemsize))
    if x.shape[0] <= tile:
        return _routed(numerics, x, chosen, share, experts) if len(x) else torch.zeros_like(x)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first in range(0, x.shape[0], tile):
        part = slice(first, first + tile)
        result[part] = _routed(numerics, x[part], chosen[part], share[part], experts)
    return result


def prepare_shared_expert(numerics: Numerics, expert: ExpertWeights) -> SharedExpert:
    """Widen the weights; w1 and w3 become one product."""
    return SharedExpert(
        prepare_linear(numerics, expert.w1, expert.w3), prepare_linear(numerics, expert.w2), expert.limit
    )


def shared_expert(numerics: Numerics, x: Tensor, routed: Tensor, expert: SharedExpert) -> Tensor:
    """routed + w2(swiglu(w1 x, w3 x)): [T, H] float32."""
    expect("x", x, (None, None), torch.float32)
    expect("routed", routed, tuple(x.shape), torch.float32)
    hidden = numerics.act(_swiglu(linear(numerics, x, expert.gate_up), expert.limit))
    return numerics.act(routed + linear(numerics, hidden, expert.down))


def _routed(numerics: Numerics, x: Tensor, chosen: Tensor, share: Tensor, experts: Experts) -> Tensor:
    """Pairs sorted by expert, one product per expert on its stretch of pairs, then back into token order.

    No more than one packed expert is widened at a time.
    """
    (num_tokens, k), hidden_size = chosen.shape, x.shape[1]
    rounds_input = experts.stored.w1.is_quantized and numerics.gemm_inputs
    x = numerics.wide(quant.round_fp8(x) if rounds_input else x)
    if num_tokens == 1:  # nothing to sort
        used, counts = chosen[0].tolist(), [1] * k
        inputs, weights = [x] * k, share[0]
    else:
        order = chosen.flatten().argsort(stable=True)
        used, counts = _counts(chosen, experts.stored.w1.value.shape[0])
        inputs, weights = x[order // k].split(counts), share.flatten()[order]
    both = [F.linear(part, experts.gate_up(numerics, expert)) for part, expert in zip(inputs, used, strict=True)]
    hidden = _swiglu(numerics.act(torch.cat(both)), experts.stored.limit)
    hidden = numerics.act(hidden * weights.unsqueeze(-1))
    parts = numerics.wide(quant.round_fp8(hidden) if rounds_input else hidden).split(counts)
    outputs = [F.linear(part, experts.down(numerics, expert)) for part, expert in zip(parts, used, strict=True)]
    pairs = numerics.act(torch.cat(outputs))
    if num_tokens > 1:
        pairs = torch.empty_like(pairs).index_copy_(0, order, pairs)
    pairs = pairs.view(num_tokens, k, hidden_size)
    return pairs.sum(1) if numerics.fuses else _sum_by_expert(pairs, chosen)


def _sum_by_expert(pairs: Tensor, chosen: Tensor) -> Tensor:
    """Sum of pairs [T, k, H] over k, one after the other by expert number: the order of a loop over experts."""
    places = chosen.argsort(dim=1)
    tokens = torch.arange(len(pairs), device=pairs.device)
    result = pairs[tokens, places[:, 0]]
    for place in range(1, places.shape[1]):
        result = result + pairs[tokens, places[:, place]]
    return result


def _counts(chosen: Tensor, num_experts: int) -> tuple[list[int], list[int]]:
    """The experts that were chosen, ascending, and how often each was."""
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    used = [expert for expert, count in enumerate(counts) if count]
    return used, [counts[expert] for expert in used]


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def _one(stack: Weight, expert: int) -> Weight:
    return Weight(stack.value[expert], None if stack.scale is None else stack.scale[expert])
