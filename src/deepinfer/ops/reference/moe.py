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
    """Routed experts: `wide` is (w1 above w3 [E, 2 * inner, H], w2 [E, H, inner]) or None; `stored` as given."""

    stored: ExpertWeights
    wide: tuple[Tensor, Tensor] | None

    def gate_up(self, numerics: Numerics, expert: int) -> Tensor:
        """w1 above w3 of one expert, [2 * inner, H] in the accumulation dtype."""
        if self.wide is not None:
            return self.wide[0][expert]
        parts = (_one(stack, expert) for stack in (self.stored.w1, self.stored.w3))
        return torch.cat([quant.dequantise(part, numerics.accumulate) for part in parts])

    def down(self, numerics: Numerics, expert: int) -> Tensor:
        """w2 of one expert, [H, inner] in the accumulation dtype."""
        if self.wide is not None:
            return self.wide[1][expert]
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
        return Experts(experts, None)
    w1, w2, w3 = (quant.dequantise(stack, numerics.accumulate) for stack in stacks)
    return Experts(experts, (torch.cat([w1, w3], dim=1), w2))


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
    x = (quant.round_fp8(x) if rounds_input else x).to(numerics.accumulate)
    if num_tokens == 1:  # nothing to sort
        inputs, weights = x.expand(k, -1), share[0]
        stretches = [(expert, pair, pair + 1) for pair, expert in enumerate(chosen[0].tolist())]
    else:
        order = chosen.flatten().argsort(stable=True)
        inputs, weights = x[order // k], share.flatten()[order]
        stretches = _stretches(chosen, experts.stored.w1.value.shape[0])
    both = [F.linear(inputs[a:b], experts.gate_up(numerics, expert)) for expert, a, b in stretches]
    hidden = _swiglu(numerics.act(torch.cat(both)), experts.stored.limit)
    hidden = numerics.act(hidden * weights.unsqueeze(-1))
    hidden = (quant.round_fp8(hidden) if rounds_input else hidden).to(numerics.accumulate)
    outputs = [F.linear(hidden[a:b], experts.down(numerics, expert)) for expert, a, b in stretches]
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


def _stretches(chosen: Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """(expert, start, end) of each chosen expert's pairs once they are sorted by expert."""
    counts, stretches, start = torch.bincount(chosen.flatten(), minlength=num_experts).tolist(), [], 0
    for expert, count in enumerate(counts):
        if count:
            stretches.append((expert, start, start + count))
            start += count
    return stretches


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def _one(stack: Weight, expert: int) -> Weight:
    return Weight(stack.value[expert], None if stack.scale is None else stack.scale[expert])
