"""Products of every expert with the tokens that chose it, from packed e2m1 weights.

A step's (token, expert) pairs are ordered by expert on the device. A tile of an expert's matrix is
widened in registers to e4m3 on the scale of its row and multiplied as the left operand, as in
`linear.py`. Where CUDA C++ can be built its kernel takes the place of this one (`products.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cuda.hopper.numbers import e2m1_as_e4m3, group_bytes, multiply, to_bf16
from deepinfer.backends.cuda.hopper.quant import Rows
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

STEP = 128  # columns of a matrix that are multiplied at a time
MOST_OCTAVES = 11  # between the groups of a row, so that each code is a normal e4m3


@dataclass(frozen=True)
class Stack:
    """One matrix of every expert.

    codes [E, rows, width / 2] uint8 as in the checkpoint. shifts [E, rows, width / 32] uint8: 8 times
    a group's exponent above the least that its row keeps, 0 to 11. scale [E, rows] float32: of the
    row; a value is 2 ** (exponent - 5) * code * scale. The width is padded with zeros to a multiple
    of 128.
    """

    codes: Tensor
    shifts: Tensor
    scale: Tensor
    width: int

    @property
    def num_rows(self) -> int:
        """Of each matrix."""
        return self.codes.shape[1]


def prepare_stack(weight: Weight) -> Stack:
    """Scales of groups become exponents above their row's. Raises ShapeError for a weight that is not e2m1."""
    require(weight.scale is not None and weight.value.dtype in (torch.int8, torch.uint8), "routed experts are e2m1")
    assert weight.scale is not None
    codes, exponents = weight.value.view(torch.uint8), weight.scale.view(torch.uint8).int()
    width = codes.shape[-1] * 2
    if missing := -width % STEP:
        codes = F.pad(codes, (0, missing // 2))
        exponents = F.pad(exponents, (0, missing // 32))
    largest = exponents.amax(-1, keepdim=True)
    shifts = exponents - largest + MOST_OCTAVES
    if bool((shifts < 0).any()):
        codes = _moved_down(codes.unflatten(-1, (-1, 16)), shifts.clamp_max(0)).flatten(-2)
    scale = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - (127 + MOST_OCTAVES - 5)).squeeze(-1)
    return Stack(codes.contiguous(), (shifts.clamp_min(0) * 8).to(torch.uint8), scale, width)


def _moved_down(codes: Tensor, exponents: Tensor) -> Tensor:
    """Codes [..., 16] uint8 times 2 ** exponents [...], rounded: groups eleven octaves and more below their row."""
    known = quant.tables(codes.device)
    pairs = known.e2m1_pairs[codes.int()].view(torch.float32).unflatten(-1, (-1, 2))  # [..., 16, 2]
    small = torch.ldexp(pairs, exponents.clamp_min(-100)[..., None, None])
    code = torch.bucketize(small.abs(), known.e2m1_bounds).add_(pairs.signbit(), alpha=8).to(torch.uint8)
    return code[..., 0] | code[..., 1] << 4


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
def widened(codes_at, shifts_at, is_row, ROW_TILE: tl.constexpr, STEP: tl.constexpr):
    """[ROW_TILE, STEP] e4m3 of the rows whose codes and shifts begin at these places [ROW_TILE]."""
    byte = tl.arange(0, STEP // 2)[None, :]
    shift = group_bytes(shifts_at, is_row, STEP // 32, STEP // 32, True)
    packed = tl.reshape(tl.load(codes_at[:, None] + byte), [ROW_TILE, STEP // 32, 16])
    return tl.reshape(tl.join(*e2m1_as_e4m3(packed, shift)), [ROW_TILE, STEP])


@triton.jit
def experts_kernel(
    x, x_scale, codes, shifts, scale, order, ends, out, num_experts, pairs_per_line,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EXPERT_TILE: tl.constexpr,
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
        codes_at, shifts_at = codes + matrix_row * (PADDED // 2), shifts + matrix_row * (PADDED // 32)
        column = tl.arange(0, STEP)
        x_at = x + line.to(tl.int64)[None, :] * WIDTH + column[:, None]
        total = tl.zeros([ROW_TILE, TOKEN_TILE], tl.float32)
        for start in range(0, PADDED, STEP):
            right = tl.load(x_at, mask=column[:, None] < WIDTH - start, other=0.0) if WIDTH < PADDED else tl.load(x_at)
            left = widened(codes_at, shifts_at, is_row, ROW_TILE, STEP)
            codes_at += STEP // 2
            shifts_at += STEP // 32
            # Added here: with its left operand in registers the product would stay in the narrow accumulator.
            total += multiply(left, right, tl.zeros([ROW_TILE, TOKEN_TILE], tl.float32), STEP)
            x_at += STEP
        total *= tl.load(scale + matrix_row)[:, None] * tl.load(x_scale + line, mask=is_pair, other=0.0)[None, :]
        out_at = out + pair.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(out_at, to_bf16(tl.trans(total)), mask=is_pair[:, None] & is_row[None, :])


def ordered(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs [T * k] of chosen [T, k] int32 in the order of experts, and where those of each end [E]."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    order_kernel[(num_experts,)](chosen, order, ends, len(order), 1024, num_warps=4)
    return order, ends


def expert_matmul(x: Rows, stack: Stack, order: Tensor, ends: Tensor, pairs_per_line: int) -> Tensor:
    """Each pair's line of x times its expert's matrix: [pairs, rows] bf16."""
    num_experts, num_rows, half = stack.codes.shape
    num_pairs = len(order)
    out = torch.empty(num_pairs, num_rows, dtype=torch.bfloat16, device=order.device)
    options = expert_tiles(num_pairs, num_experts)
    most = num_pairs // options["TOKEN_TILE"] + min(num_experts, num_pairs)
    experts_kernel[(most, cdiv(num_rows, options["ROW_TILE"]))](
        x.values, x.scale, stack.codes, stack.shifts, stack.scale, order, ends, out, num_experts, pairs_per_line,
        num_rows, stack.width, half * 2, next_power_of_2(num_experts), STEP=STEP, **options,
    )  # fmt: skip
    return out


def expert_tiles(num_pairs: int, num_experts: int) -> dict[str, int]:
    """Launch options for this many pairs."""
    mean = num_pairs // num_experts
    if mean <= 16:
        return {"TOKEN_TILE": 16, "ROW_TILE": 64, "num_warps": 4, "num_stages": 5}
    token_tile, num_stages = (32, 5) if mean <= 48 else (64, 4)
    return {"TOKEN_TILE": token_tile, "ROW_TILE": 128, "num_warps": 4, "num_stages": num_stages}
