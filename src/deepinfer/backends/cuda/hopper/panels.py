"""FP8 tokens in panels, the order in which the kernel of `products.py` reads them, and their places by expert.

A panel is 128 columns of all tokens, then come the next 128. A token's line of 128 bytes has its pieces of 16 swapped
by the line's number, as the matrix unit wants them in shared memory. So a stretch of any number of tokens of a panel
is one piece of memory that a bulk copy can bring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.quant import fold_groups
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference.shapes import expect

STEP = 128  # columns of a panel
TOKEN_TILE = 256  # tokens that a product reads together at most


class Panels(NamedTuple):
    """e4m3 tokens at their places: codes uint8, flat, [steps, size, 128]; scale [size] float32.

    Both are longer than that by a tile, which a product reads and does not use. size: places, a multiple of 8.
    num_tokens: that lie at the first ones, where there are no `Places`; of several experts or groups, each of which has
    as many places, a multiple of 8, at the first ones of each.
    """

    codes: Tensor
    scale: Tensor
    size: int
    num_tokens: int


class Places(NamedTuple):
    """Where tokens lie by expert: places of [T * k] pairs, and where those of each of [E] experts begin and end.

    Each begins at a multiple of 8. size: places that there may be in all.
    """

    of_pairs: Tensor
    begins: Tensor
    ends: Tensor
    size: int


def empty_panels(
    num_tokens: int, padded_width: int, places: Places | None, device: torch.device, num_groups: int = 1
) -> Panels:
    """Panels for these tokens in each group, or with all places, not filled."""
    size = -(-(places.size if places else num_tokens) // 8) * 8 * num_groups
    codes = torch.empty(size * padded_width + TOKEN_TILE * STEP, dtype=torch.uint8, device=device)
    return Panels(codes, torch.empty(size + TOKEN_TILE, device=device), size, num_tokens)


@triton.jit
def write_panels(
    codes, scale, place, size, folded, factor, PADDED: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr = 0
):  # fmt: skip
    """One token's e4m3 bytes [GROUPS, 32] of its groups from FIRST on, and its scale, to a place."""
    column = (FIRST + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    piece = (column % 128 // 16) ^ (place % 8).to(tl.int32)
    at = (column // 128 * size + place) * 128 + piece * 16 + column % 16
    at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, 16])
    tl.store(codes + at, folded, mask=column < PADDED)
    tl.store(scale + place, factor)


@triton.jit
def quantise_panels_kernel(
    x, of_pairs, codes, scale, row_stride, part_stride, size,
    WIDTH: tl.constexpr, PART: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """One token, of parts of PART columns, to its place, or to the places of its COPIES pairs."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = column if PART == WIDTH else column // PART * part_stride + column % PART
    values = tl.load(x + row * row_stride + at, mask=column < WIDTH, other=0.0).to(tl.float32)
    folded, factor = fold_groups(values)
    if COPIES == 0:
        write_panels(codes, scale, row, size, folded, factor, PADDED, GROUPS)
    for copy in tl.static_range(COPIES):
        place = tl.load(of_pairs + row * COPIES + copy).to(tl.int64)
        write_panels(codes, scale, place, size, folded, factor, PADDED, GROUPS)


def quantise_panels(x: Tensor, padded_width: int, places: Places | None = None) -> Panels:
    """x [n, width] bf16, rows dense -> e4m3 panels; with places each row goes to those of its pairs.

    A row may also come in dense parts: x [n, parts, width / parts].
    """
    parts = x if x.dim() == 3 else x.unsqueeze(1)
    expect("activations", parts, (None, None, None), torch.bfloat16)
    num_rows, num_parts, part = parts.shape
    panels = empty_panels(num_rows, padded_width, places, x.device)
    if num_rows:
        groups = next_power_of_2(padded_width // 32)
        of_pairs, copies = (places.of_pairs, len(places.of_pairs) // num_rows) if places else (x, 0)
        quantise_panels_kernel[(num_rows,)](
            x, of_pairs, panels.codes, panels.scale, *parts.stride()[:2], panels.size, num_parts * part, part,
            padded_width, groups, copies, num_warps=8 if groups > 64 else 4, launch_pdl=True,
        )  # fmt: skip
    return panels


@triton.jit
def place_kernel(chosen, of_pairs, begins, ends, num_pairs, TILE: tl.constexpr):
    """Places of one expert's pairs, in their order, behind those of the experts before."""
    begin()
    expert = tl.program_id(0)
    pair = tl.arange(0, TILE)
    before, own = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, num_pairs, TILE):
        value = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=2147483647)
        before += (value < expert).to(tl.int32)
        own += (value == expert).to(tl.int32)
    place = (tl.sum(before) + 7) // 8 * 8 + 8 * expert
    tl.store(begins + expert, place)
    tl.store(ends + expert, place + tl.sum(own))
    for start in range(0, num_pairs, TILE):
        value = tl.load(chosen + start + pair, mask=start + pair < num_pairs, other=2147483647)
        is_own = (value == expert).to(tl.int32)
        tl.store(of_pairs + start + pair, place + tl.cumsum(is_own, 0) - is_own, mask=is_own > 0)
        place += tl.sum(is_own)


def places_of(chosen: Tensor, num_experts: int) -> Places:
    """chosen [T, k] int32 -> places of all pairs, in the order of experts."""
    num_pairs, device = chosen.numel(), chosen.device
    of_pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    begins, ends = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    place_kernel[(num_experts,)](
        chosen.contiguous(), of_pairs, begins, ends, num_pairs, 1024, num_warps=4, launch_pdl=True
    )
    return Places(of_pairs, begins, ends, num_pairs + 8 * (num_experts + 1))
