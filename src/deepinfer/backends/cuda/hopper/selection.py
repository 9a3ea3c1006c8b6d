"""The best columns of a row of scores, ascending and exact, one program a row.

The `count` best of up to DIRECT columns are found in registers: a score becomes an integer that
orders alike, and the wanted one, of which `count` are no smaller, is found bit by bit by counting.

Of more columns only those of the `count` best groups are read, where a group of columns counts by
its best and equal groups go by place. That is exact for any scores: outside these groups every
score has `count` others before it, the bests of these groups.
"""

from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.backends.cuda.native import Kernel, load

GROUP = 8  # columns whose best score stands for them
DIRECT = 16384  # columns that a program holds in registers
PEAK_TILE = 512
NATIVE = Path(__file__).parent / "native" / "selection.cu"
NATIVE_THREADS, NATIVE_FEW = 512, 4096  # as in this source, which takes up to DIRECT columns and groups of GROUP


@triton.jit
def ordered(score, is_here):
    """float32 -> uint32 that order alike, 0 where not here or -inf; -0 counts as 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(is_here & (score > float("-inf")), key, 0).to(tl.uint32)


@triton.jit
def count_of(condition):
    """How many are true."""
    return tl.sum(condition.to(tl.int32))


@triton.jit
def threshold_of(key, needed, known):
    """A number that `needed` of the keys reach, or, where equal keys forbid that, the largest that more reach.

    known: keys above 0, at least `needed` >= 1. Bits in which these do not differ are not searched.
    """
    highest = tl.max(key)
    differ = highest ^ tl.min(tl.where(key > 0, key, highest))
    for shift in tl.static_range(5):
        differ = differ | (differ >> (1 << shift))
    found, bit = (highest | differ) ^ differ, differ ^ (differ >> 1)
    count = known
    while (bit > 0) & (count > needed):
        reached = count_of(key >= (found | bit))
        if reached >= needed:
            found = found | bit
            count = reached
        bit = bit >> 1
    return tl.maximum(found, 1)


@triton.jit
def choose_kernel(
    scores, visible, blocks, chosen, score_stride, num_columns, num_blocks, UNIT,
    COUNT: tl.constexpr, SIZE: tl.constexpr, BY_PLACE: tl.constexpr, IS_PINNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row. SIZE > 0: the columns of its blocks alone, whose scores lie BY_PLACE side by side or at the columns."""
    row = tl.program_id(0).to(tl.int64)
    limit = (tl.load(visible + row) + (UNIT - 1)) // UNIT
    place = tl.arange(0, TILE)
    column, is_here = place, place < num_columns
    if SIZE > 0:
        block = tl.load(blocks + row * num_blocks + place // SIZE, mask=place < num_blocks * SIZE, other=-1)
        column, is_here = block * SIZE + place % SIZE, block >= 0
    is_here &= column < limit
    at = scores + row * score_stride
    if BY_PLACE:
        at += place
    else:
        at += column
    score = tl.load(at, mask=is_here, other=float("-inf"))
    if IS_PINNED:
        score = tl.where(column == limit - 1, float("inf"), score)
    key = ordered(score, is_here)
    known = count_of(key > 0)
    needed = tl.minimum(COUNT, known)
    chosen += row * COUNT
    if needed > 0:
        threshold = threshold_of(key, needed, known)
        is_above, is_equal = key > threshold, key == threshold
        spare = needed - count_of(is_above)
        both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)  # counted together
        before = tl.cumsum(both, 0) - both
        num_equal = before >> 16
        keep = is_above | (is_equal & (num_equal < spare))
        if SIZE > 0:  # again, for it would occupy registers all the while
            block = tl.load(blocks + row * num_blocks + place // SIZE, mask=keep, other=-1)
            column = block * SIZE + place % SIZE
        tl.store(chosen + (before & 65535) + tl.minimum(num_equal, spare), column, mask=keep)
    for start in range(0, COUNT, TILE):
        tl.store(chosen + start + place, -1 + place * 0, mask=(start + place >= needed) & (start + place < COUNT))


@triton.jit
def peak_kernel(
    scores, visible, peaks, score_stride, peak_stride, num_columns, num_peaks, UNIT,
    SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best visible score of each `SIZE` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.minimum((tl.load(visible + row) + (UNIT - 1)) // UNIT, num_columns)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tl.program_id(1) * TILE * SIZE < limit:
        peak = tl.full([TILE], float("-inf"), tl.float32)
        for member in tl.static_range(SIZE):
            column = group * SIZE + member
            score = tl.load(scores + row * score_stride + column, mask=column < limit, other=float("-inf"))
            peak = tl.where(score > peak, score, peak)  # not a number: never chosen
        tl.store(peaks + row * peak_stride + group, peak, mask=group < num_peaks)


def empty_scores(num_rows: int, width: int, device: torch.device) -> Tensor:
    """[rows, width] float32 whose rows begin at multiples of 16 bytes, as the CUDA C++ kernel reads them."""
    return torch.empty(num_rows, cdiv(width, 4) * 4, device=device)[:, :width]


def group_peaks(scores: Tensor, visible: Tensor, size: int = GROUP, unit: int = 1) -> Tensor:
    """The best visible score of each `size` columns: [rows, ceil(n / size)] float32; `unit` as in best_columns.

    What stands for groups that are not visible is not defined.
    """
    num_rows, width = scores.shape
    peaks = empty_scores(num_rows, cdiv(width, size), scores.device)
    if peaks.numel():
        peak_kernel[(num_rows, cdiv(peaks.shape[1], PEAK_TILE))](
            scores, visible, peaks, scores.stride(0), peaks.stride(0), width, peaks.shape[1], unit, size, PEAK_TILE
        )
    return peaks


def best_columns(
    scores: Tensor,
    visible: Tensor,
    count: int,
    *,
    peaks: Tensor | None = None,
    unit: int = 1,
    is_pinned: bool = False,
) -> Tensor:
    """The `count` best visible columns, ascending, ties to the lower, -1 behind: [rows, count] int32.

    scores [rows, n] float32; -inf is never chosen. visible [rows] int32: a row's first
    ceil(visible / unit) columns are visible, and with is_pinned the last of them counts as infinite.
    peaks [rows, ceil(n / GROUP)]: group_peaks(scores, visible, unit=unit), if they are known.
    """
    width = scores.shape[1]
    if width <= DIRECT:
        return _choose(scores, visible, count, width, None, 0, False, unit, is_pinned)
    if peaks is None:
        peaks = group_peaks(scores, visible, GROUP, unit)
    groups = best_columns(peaks, visible, min(count, peaks.shape[1]), unit=unit * GROUP, is_pinned=is_pinned)
    return _choose(scores, visible, count, groups.shape[1] * GROUP, groups, GROUP, False, unit, is_pinned)


def best_of_blocks(scores: Tensor, visible: Tensor, count: int, blocks: Tensor, size: int) -> Tensor:
    """The `count` best visible entries of a row's blocks of `size`, as best_columns gives them.

    blocks [rows, c] int32, ascending, -1 behind. scores [rows, c * size] float32: those of the blocks' entries.
    """
    return _choose(scores, visible, count, scores.shape[1], blocks, size, True, 1, False)


def _choose(
    scores: Tensor, visible: Tensor, count: int, width: int, blocks: Tensor | None, size: int, by_place: bool,
    unit: int, is_pinned: bool,
) -> Tensor:  # fmt: skip
    chosen = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    if not chosen.numel():
        return chosen
    num_blocks = 0 if blocks is None else blocks.shape[1]
    given = scores, visible, visible if blocks is None else blocks, chosen, scores.stride(0), width, num_blocks, unit
    if kernel := _native(scores, width, size):
        kernel.launch((len(scores), 1, 1), (*given, count, by_place, is_pinned))
        return chosen
    tile = max(256, next_power_of_2(width))
    choose_kernel[(len(scores),)](
        *given, count, size, by_place, is_pinned, tile, num_warps=min(16, max(4, tile // 512))
    )
    return chosen


def _native(scores: Tensor, width: int, size: int) -> Kernel | None:
    """The CUDA C++ kernel for so many columns; None where Triton's must do."""
    device, is_aligned = scores.device, scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
    if device.type != "cuda" or width > DIRECT or size not in (0, GROUP) or not is_aligned:
        return None
    name = ("choose_few" if width <= NATIVE_FEW else "choose_many") + ("_of_blocks" if size else "")
    return load(NATIVE, name, NATIVE_THREADS, 0, device.index or 0)
