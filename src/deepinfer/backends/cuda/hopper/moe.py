"""Router, routed experts and the shared expert.

A step's (token, expert) pairs are ordered by expert on the device. Both products of an expert read
its packed e2m1 weights and widen them in registers to e4m3 on the scale of their row; tokens are
the narrow side, as in `linear.py`. No sum crosses pairs but the last one, in order of choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.numbers import e2m1_as_e4m3, group_bytes, multiply, to_bf16
from deepinfer.backends.cuda.hopper.quant import E4M3, Matrix, Rows, fold_groups, prepare_matrix, quantise
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import ExpertWeights, RouterWeights, Weight

SCORINGS = ("sqrtsoftplus", "softmax", "sigmoid")
STEP = 128  # columns of a matrix that are widened at a time
WIDE_PAIRS = 128  # pairs an expert above which its matrices are widened in memory
WIDE_BYTES = 1 << 30  # of one widened stack
MOST_OCTAVES = 11  # between the groups of a row, so that each code is a normal e4m3


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
class Stack:
    """One matrix of every expert.

    codes [E, rows, width / 2] uint8: of each 32 columns the first 16 are low nibbles. shifts [E, rows,
    width / 32] uint8: 8 times a group's exponent above the least that its row keeps, 0 to 11. scale
    [E, rows] float32: of the row, so that values times it are 2 ** (exponent - 5) * code. The width
    is padded with zeros to a multiple of 128.
    """

    codes: Tensor
    shifts: Tensor
    scale: Tensor
    width: int


@dataclass(frozen=True)
class Experts:
    """Routed experts: w1 above w3, and w2."""

    gate_up: Stack
    down: Stack
    limit: float


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
        prepare_matrix(router.weight), bias, bias_vl, router.num_active, SCORINGS.index(router.scoring),
        router.normalize, router.scaling, router.temperature,
    )  # fmt: skip


@triton.jit
def route_kernel(
    logits, bias, bias_vl, is_image, chosen, share, scaling, temperature,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, ACTIVE: tl.constexpr, ACTIVE_TILE: tl.constexpr,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, HAS_IMAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE)
    is_expert = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=is_expert, other=-float("inf")) / temperature
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
    logits = linear(x, router.matrix, torch.float32)
    chosen = torch.empty(num_tokens, k, dtype=torch.int32, device=x.device)
    share = torch.empty(num_tokens, k, device=x.device)
    if num_tokens:
        images = is_image.contiguous().view(torch.uint8) if is_image is not None else chosen
        route_kernel[(num_tokens,)](
            logits, router.bias, router.bias_vl, images, chosen, share, router.scaling, router.temperature,
            num_experts, triton.next_power_of_2(num_experts), k, triton.next_power_of_2(k), router.scoring,
            router.normalize, is_image is not None, num_warps=1,
        )  # fmt: skip
    return chosen, share


def prepare_experts(experts: ExpertWeights) -> Experts:
    """Pack routed experts; w1 and w3 become one product."""
    w1, w3 = _stack(experts.w1), _stack(experts.w3)
    gate_up = Stack(
        torch.cat([w1.codes, w3.codes], dim=1), torch.cat([w1.shifts, w3.shifts], dim=1),
        torch.cat([w1.scale, w3.scale], dim=1), w1.width,
    )  # fmt: skip
    return Experts(gate_up, _stack(experts.w2), experts.limit)


def _stack(weight: Weight) -> Stack:
    require(weight.scale is not None and weight.value.dtype in (torch.int8, torch.uint8), "routed experts are e2m1")
    assert weight.scale is not None
    codes, exponents = weight.value.view(torch.uint8), weight.scale.view(torch.uint8).int()
    width = codes.shape[-1] * 2
    if missing := -width % STEP:
        codes = F.pad(codes, (0, missing // 2))
        exponents = F.pad(exponents, (0, missing // 32))
    largest = exponents.amax(-1, keepdim=True)
    shifts = exponents - largest + MOST_OCTAVES
    groups = codes.unflatten(-1, (-1, 16))
    columns = torch.stack([groups & 15, groups >> 4], dim=-1).flatten(-2)  # [E, rows, groups, 32]
    if bool((shifts < 0).any()):
        columns = _moved_down(columns, shifts.clamp_max(0))
    packed = columns[..., :16] | columns[..., 16:] << 4
    scale = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - (127 + MOST_OCTAVES - 5)).squeeze(-1)
    return Stack(packed.flatten(-2), (shifts.clamp_min(0) * 8).to(torch.uint8), scale, width)


def _moved_down(columns: Tensor, exponents: Tensor) -> Tensor:
    """Codes [..., 32] times 2 ** exponents [...], rounded: groups that lie eleven octaves and more below their row."""
    numbers = quant.tables(columns.device).e2m1_pairs[columns.int()].view(torch.float32)[..., ::2]
    small = torch.ldexp(numbers, exponents.unsqueeze(-1).clamp_min(-100))
    code = torch.bucketize(small.abs(), quant.tables(columns.device).e2m1_bounds).to(torch.uint8)
    return code | (columns & 8)


@triton.jit
def order_kernel(chosen, order, ends, num_pairs, TILE: tl.constexpr):
    """Places of one expert's pairs, in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    place = tl.arange(0, TILE)
    before, own = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, num_pairs, TILE):
        value = tl.load(chosen + start + place, mask=start + place < num_pairs, other=2147483647)
        before += (value < expert).to(tl.int32)
        own += (value == expert).to(tl.int32)
    written, count = tl.sum(before), tl.sum(own)
    tl.store(ends + expert, written + count)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            value = tl.load(chosen + start + place, mask=start + place < num_pairs, other=2147483647)
            is_own = (value == expert).to(tl.int32)
            tl.store(order + written + tl.cumsum(is_own, 0) - is_own, start + place, mask=is_own > 0)
            written += tl.sum(is_own)


@triton.jit
def experts_kernel(
    x, x_scale, codes, shifts, wide, scale, order, ends, out, num_experts, pairs_per_line,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, IS_WIDE: tl.constexpr, EXPERT_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr, ROW_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of out [pairs, ROWS] = x [pair // pairs_per_line] @ matrix of the pair's expert.T."""
    expert = tl.arange(0, EXPERT_TILE)
    is_expert = expert < num_experts
    end = tl.load(ends + expert, mask=is_expert, other=0)
    begin = tl.load(ends + expert - 1, mask=is_expert & (expert > 0), other=0)
    tiles = tl.where(is_expert, (end - begin + TOKEN_TILE - 1) // TOKEN_TILE, 0)
    tile_ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    if tile < tl.sum(tiles):
        own = tl.sum(((tile_ends <= tile) & is_expert).to(tl.int32))
        is_own = expert == own
        inside = tile - tl.sum(tl.where(is_own, tile_ends - tiles, 0))
        place = tl.sum(tl.where(is_own, begin, 0)) + inside * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
        is_pair = place < tl.sum(tl.where(is_own, end, 0))
        pair = tl.load(order + place, mask=is_pair, other=0)
        line = pair // pairs_per_line
        row = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
        is_row = row < ROWS
        matrix_row = own.to(tl.int64) * ROWS + tl.where(is_row, row, 0)
        byte = tl.arange(0, STEP // 2)
        codes_at = codes + (matrix_row * (PADDED // 2))[:, None] + byte[None, :]
        shifts_at = shifts + matrix_row * (PADDED // 32)
        wide_at = wide + (matrix_row * PADDED)[:, None] + byte[None, :]
        column = byte + byte // 16 * 16  # the first half of each group
        x_at = x + line.to(tl.int64)[None, :] * WIDTH + column[:, None]
        total = tl.zeros([ROW_TILE, TOKEN_TILE], tl.float32)
        for start in range(0, PADDED, STEP):
            if WIDTH == PADDED:
                low, high = tl.load(x_at), tl.load(x_at + 16)
            else:
                low = tl.load(x_at, mask=column[:, None] < WIDTH - start, other=0.0)
                high = tl.load(x_at + 16, mask=column[:, None] < WIDTH - start - 16, other=0.0)
            if IS_WIDE:
                first, second = tl.load(wide_at), tl.load(wide_at + STEP // 2)
                wide_at += STEP
            else:
                shift = group_bytes(shifts_at, row < ROWS, STEP // 32, STEP // 32, True)
                packed = tl.reshape(tl.load(codes_at), [ROW_TILE, STEP // 32, 16])
                first, second = e2m1_as_e4m3(packed, shift)
                first, second = tl.reshape(first, [ROW_TILE, STEP // 2]), tl.reshape(second, [ROW_TILE, STEP // 2])
                codes_at += STEP // 2
                shifts_at += STEP // 32
            part = multiply(first, low, tl.zeros([ROW_TILE, TOKEN_TILE], tl.float32), STEP // 2)
            total += multiply(second, high, part, STEP // 2)
            x_at += STEP
        total *= tl.load(scale + matrix_row)[:, None] * tl.load(x_scale + line, mask=is_pair, other=0.0)[None, :]
        out_at = out + pair.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(out_at, to_bf16(tl.trans(total)), mask=is_pair[:, None] & is_row[None, :])


@triton.jit
def widen_kernel(codes, shifts, wide, num_rows, PADDED: tl.constexpr, ROW_TILE: tl.constexpr, STEP: tl.constexpr):
    """Codes [num_rows, PADDED / 2] -> e4m3 [num_rows, PADDED]: of each STEP columns the low nibbles, then the high."""
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    byte = tl.arange(0, STEP // 2)
    start = tl.program_id(1) * STEP
    shift = group_bytes(shifts + row * (PADDED // 32) + start // 32, is_row, STEP // 32, STEP // 32, True)
    at = codes + (row * (PADDED // 2) + start // 2)[:, None] + byte[None, :]
    packed = tl.reshape(tl.load(at, mask=is_row[:, None], other=0), [ROW_TILE, STEP // 32, 16])
    first, second = e2m1_as_e4m3(packed, shift)
    at = wide + (row * PADDED + start)[:, None] + byte[None, :]
    tl.store(at, tl.reshape(first, [ROW_TILE, STEP // 2]), mask=is_row[:, None])
    tl.store(at + STEP // 2, tl.reshape(second, [ROW_TILE, STEP // 2]), mask=is_row[:, None])


def expert_matmul(x: Rows, stack: Stack, order: Tensor, ends: Tensor, pairs_per_line: int) -> Tensor:
    """Each pair's line of x times its expert's matrix: [pairs, rows] bf16.

    With many pairs an expert, its matrix is widened once in memory instead of by every tile of
    pairs: the same e4m3 in the same order, so the same bits.
    """
    num_experts, num_rows, half = stack.codes.shape
    num_pairs, is_wide = len(order), len(order) > WIDE_PAIRS * num_experts and stack.codes.numel() * 2 <= WIDE_BYTES
    out = torch.empty(num_pairs, num_rows, dtype=torch.bfloat16, device=order.device)
    wide = x.values
    if is_wide:
        wide = torch.empty(num_experts * num_rows, half * 2, dtype=torch.uint8, device=order.device).view(E4M3)
        widen_kernel[(triton.cdiv(len(wide), 64), half * 2 // STEP)](
            stack.codes, stack.shifts, wide, len(wide), half * 2, 64, STEP, num_warps=4
        )
    options = expert_tiles(num_pairs, num_experts)
    most = num_pairs // options["TOKEN_TILE"] + min(num_experts, num_pairs)
    experts_kernel[(most, triton.cdiv(num_rows, options["ROW_TILE"]))](
        x.values, x.scale, stack.codes, stack.shifts, wide, stack.scale, order, ends, out, num_experts, pairs_per_line,
        num_rows, stack.width, half * 2, is_wide, triton.next_power_of_2(num_experts), STEP=STEP, **options,
    )  # fmt: skip
    return out


def expert_tiles(num_pairs: int, num_experts: int) -> dict[str, int]:
    """Launch options for this many pairs."""
    mean = num_pairs // num_experts
    if mean <= 16:
        return {"TOKEN_TILE": 16, "ROW_TILE": 64, "num_warps": 4, "num_stages": 5}
    token_tile = 32 if mean <= 48 else 64 if mean <= 96 else 128
    return {"TOKEN_TILE": token_tile, "ROW_TILE": 128, "num_warps": 8, "num_stages": 4}


@triton.jit
def swiglu_kernel(
    both, share, codes, scale, limit,
    INNER: tl.constexpr, GROUPS: tl.constexpr, HAS_SHARE: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """One line: share * silu(gate) * up, clamped, rounded to bf16 and quantised for the next product."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_here = column < INNER
    gate = tl.load(both + line * 2 * INNER + column, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(both + line * 2 * INNER + INNER + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate * tl.sigmoid(gate) * up
    if HAS_SHARE:
        value *= tl.load(share + line)
    folded, factor = fold_groups(to_bf16(value).to(tl.float32), GROUPS)
    tl.store(codes + line * INNER + column, folded, mask=is_here)
    tl.store(scale + line, factor)


def swiglu(both: Tensor, share: Tensor | None, limit: float) -> Rows:
    """both [n, 2 * inner] bf16 (gate, up), share [n] float32 -> e4m3 rows [n, inner]."""
    num_lines, inner = len(both), both.shape[1] // 2
    codes = torch.empty(num_lines, inner, dtype=torch.uint8, device=both.device)
    scale = torch.empty(num_lines, device=both.device)
    if num_lines:
        swiglu_kernel[(num_lines,)](
            both, both if share is None else share, codes, scale, limit, inner,
            triton.next_power_of_2(triton.cdiv(inner, 32)), share is not None, limit > 0, num_warps=4,
        )  # fmt: skip
    return Rows(codes.view(E4M3), scale)


@triton.jit
def combine_kernel(pairs, out, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(ACTIVE):
        part = tl.load(pairs + (token * ACTIVE + place) * WIDTH + column, mask=column < WIDTH, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * WIDTH + column, total, mask=column < WIDTH)


def experts(x: Tensor, chosen: Tensor, share: Tensor, experts: Experts) -> Tensor:
    """Sum over the chosen experts, best first: x [T, H] bf16, chosen and share [T, k] -> [T, H] float32."""
    num_experts, hidden, _ = experts.down.codes.shape
    expect("x", x, (None, experts.gate_up.width), torch.bfloat16)
    expect("chosen", chosen, (len(x), None), torch.int32)
    expect("share", share, tuple(chosen.shape), torch.float32)
    (num_tokens, k), device = chosen.shape, x.device
    out = torch.empty(num_tokens, hidden, device=device)
    if not num_tokens:
        return out
    order = torch.empty(num_tokens * k, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    order_kernel[(num_experts,)](chosen.contiguous(), order, ends, num_tokens * k, 1024, num_warps=4)
    both = expert_matmul(quantise(x), experts.gate_up, order, ends, k)
    pairs = expert_matmul(swiglu(both, share.contiguous(), experts.limit), experts.down, order, ends, 1)
    tile = min(1024, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, tile))](pairs, out, hidden, k, tile, num_warps=4)
    return out


def prepare_shared_expert(expert: ExpertWeights) -> SharedExpert:
    """w1 and w3 become one product. Raises ShapeError for weights that are not quantised."""
    require(expert.w1.is_quantized and expert.w2.is_quantized, "the shared expert is e4m3")
    return SharedExpert(prepare_matrix(expert.w1, expert.w3), prepare_matrix(expert.w2), expert.limit)


@triton.jit
def add_kernel(a, b, out, num_numbers, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_here = at < num_numbers
    total = tl.load(a + at, mask=is_here) + tl.load(b + at, mask=is_here).to(tl.float32)
    tl.store(out + at, to_bf16(total), mask=is_here)


def shared_expert(x: Tensor, routed: Tensor, expert: SharedExpert) -> Tensor:
    """routed + w2(swiglu(w1 x, w3 x)): x [T, H] bf16, routed [T, H] float32 -> [T, H] bf16."""
    expect("x", x, (None, None), torch.bfloat16)
    expect("routed", routed, tuple(x.shape), torch.float32)
    own = linear(swiglu(linear(x, expert.gate_up), None, expert.limit), expert.down)
    out = torch.empty_like(own)
    if own.numel():
        add_kernel[(triton.cdiv(own.numel(), 1024),)](routed.contiguous(), own, out, own.numel(), 1024, num_warps=4)
    return out
