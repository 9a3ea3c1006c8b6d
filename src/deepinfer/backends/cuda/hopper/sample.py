"""The likeliest token and the draw, each in one pass over the logits, without asking the device which rows are random.

A row is cut into parts of one fixed size. The noise of an id is that of `ops/reference/sample.py`: SplitMix64 of (seed,
position, id), and the logarithms are those of float64: where the float32 ones leave one id alone near the best of its
part, of that id only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect

PART = 2048  # ids
BEST_PART = 4096  # of what does no arithmetic


@triton.jit
def is_number(x):
    """Neither NaN nor infinite."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def mixed(x):
    """The finaliser of SplitMix64 on uint64, wrapping."""
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def random_bits(key, token):
    """52 bits of an id's noise as uint64."""
    return mixed(key + (token + 1).to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)) >> 12


@triton.jit
def gumbel(bits):
    """The noise of these bits in float64."""
    chance = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return -tl.log(-tl.log(chance))


@triton.jit
def rough_gumbel(bits):
    """The same in float32 to within 4e-5: fast logarithms are that good but near one, where the series takes over."""
    is_above = bits >= 2251799813685248  # a half
    rest = tl.where(is_above, 4503599627370495 - bits, bits)
    far = (rest.to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16  # from one, or from zero
    series = far * (1.0 + far * (0.5 + far * (0.3333333333 + far * (0.25 + far * 0.2))))
    return -tl.log(tl.where(is_above & (far < 0.03125), series, -tl.log(tl.where(is_above, 1.0 - far, far))))


@triton.jit
def best_kernel(
    logits, temperature, seeds, positions, scores, ids, row_stride, num_ids, num_parts, PART: tl.constexpr
):  # fmt: skip
    """The best score of one part of a row, and the lowest id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    is_id = token < num_ids
    at = logits + row * row_stride
    logit = tl.load(at + token, mask=is_id, other=float("-inf"))
    heat = tl.load(temperature + row)
    if heat > 0:
        gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
        key = mixed(mixed(seed + gamma) + position * gamma)
        bits = random_bits(key, token)
        cold = logit / heat
        rough = cold + rough_gumbel(bits)
        size = tl.max(tl.where(is_number(cold), tl.abs(cold), 0.0), 0)
        is_near = is_id & (rough >= tl.max(rough, 0) - (2e-4 + 1e-6 * size))
        pick = tl.min(tl.where(is_near, token, num_ids), 0)
        if tl.sum(is_near.to(tl.int32), 0) == 1:
            best = tl.load(at + pick).to(tl.float64) / heat.to(tl.float64) + gumbel(random_bits(key, pick))
        else:
            score = logit.to(tl.float64) / heat.to(tl.float64) + gumbel(bits)
            best = tl.max(score, 0)
            pick = tl.min(tl.where(is_id & (score == best), token, num_ids), 0)
    else:
        peak = tl.max(logit, 0)
        best = peak.to(tl.float64)
        pick = tl.min(tl.where(is_id & (logit == peak), token, num_ids), 0)
    tl.store(scores + row * num_parts + part, best)
    tl.store(ids + row * num_parts + part, pick)


@triton.jit
def choose_kernel(scores, ids, chosen, num_ids, num_parts, PARTS: tl.constexpr):
    """The best part of one row; id 0 where no score is a number."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    is_part = part < num_parts
    score = tl.load(scores + row * num_parts + part, mask=is_part, other=float("-inf"))
    token = tl.load(ids + row * num_parts + part, mask=is_part, other=num_ids)
    token = tl.min(tl.where(score == tl.max(score, 0), token, num_ids), 0)
    tl.store(chosen + row, tl.where(token < num_ids, token, 0).to(tl.int64))


def dense_rows(x: Tensor) -> Tensor:
    """x [n, width], copied where the numbers of a row do not lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax(logits / temperature + noise) per row [n] int64, ties to the lower id; temperature 0: no noise."""
    expect("logits", logits, (None, None), torch.float32)
    num_rows, num_ids = logits.shape
    expect("temperature", temperature, (num_rows,), torch.float32)
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        expect(name, tensor, (num_rows,), torch.int64)
    logits = dense_rows(logits)
    num_parts = cdiv(num_ids, PART)
    scores = torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        best_kernel[(num_rows, num_parts)](
            logits, temperature.contiguous(), seeds.contiguous(), positions.contiguous(), scores, ids,
            logits.stride(0), num_ids, num_parts, PART, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        choose_kernel[(num_rows,)](scores, ids, chosen, num_ids, num_parts, next_power_of_2(num_parts), num_warps=1)
    return chosen


@triton.jit
def peak_of(value, ids, is_id, num_ids, AXIS: tl.constexpr):
    """The largest logit of a part along an axis, the lowest id that has it, and the sum of exp(logit - largest).

    Where there is NaN the largest is infinity, so that neither is taken for a number.
    """
    peak, has_nan = tl.max(value, AXIS), tl.max((value != value).to(tl.int32), AXIS) > 0
    aligned = tl.expand_dims(peak, AXIS)
    place = tl.min(tl.where(is_id & (value == aligned), ids, num_ids), AXIS)
    total = tl.sum(tl.exp(value - tl.where(is_number(aligned), aligned, 0.0)), AXIS)
    return tl.where(has_nan, float("inf"), peak), place, total


@triton.jit
def row_peak_kernel(logits, peaks, ids, sums, row_stride, num_ids, num_parts, PART: tl.constexpr):
    """One part of a row."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    is_id = token < num_ids
    value = tl.load(logits + row * row_stride + token, mask=is_id, other=float("-inf"))
    peak, place, total = peak_of(value, token, is_id, num_ids, 0)
    at = row * num_parts + part
    tl.store(peaks + at, peak)
    tl.store(ids + at, place)
    tl.store(sums + at, total)


@triton.jit
def best_of_parts_kernel(
    peaks, ids, sums, token_ids, is_finite, logprobs, num_ids, num_parts, PARTS: tl.constexpr
):  # fmt: skip
    """The best part of one row."""
    begin()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    at, is_part = row * num_parts + part, part < num_parts
    peaks_of = tl.load(peaks + at, mask=is_part, other=float("-inf"))
    peak = tl.max(peaks_of, 0)
    token = tl.load(ids + at, mask=is_part, other=num_ids)
    token = tl.min(tl.where(peaks_of == peak, token, num_ids), 0)
    finite = is_number(peak)
    share = tl.exp(tl.where(finite, peaks_of - tl.where(finite, peak, 0.0), 0.0))
    total = tl.sum(tl.load(sums + at, mask=is_part, other=0.0) * share, 0)
    tl.store(token_ids + row, tl.where(finite, token, 0).to(tl.int64))
    tl.store(is_finite + row, finite.to(tl.uint8))
    tl.store(logprobs + row, tl.where(finite, -tl.log(tl.where(finite, total, 1.0)), float("nan")))


class Parts(NamedTuple):
    """What `peak_of` gives for the parts of rows: peaks, sums [rows, parts] float32, ids [rows, parts] int32."""

    peaks: Tensor
    sums: Tensor
    ids: Tensor
    num_ids: int

    @classmethod
    def empty(cls, num_rows: int, num_parts: int, num_ids: int, device: torch.device) -> Parts:
        """Not filled."""
        peaks, sums = torch.empty(2, num_rows, num_parts, device=device)
        return cls(peaks, sums, torch.empty(num_rows, num_parts, dtype=torch.int32, device=device), num_ids)


def best_of_parts(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest token of each row [n] int64, is_finite [n] bool, and its log-probability [n] float32."""
    (num_rows, num_parts), device = parts.peaks.shape, parts.peaks.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_finite, logprobs = torch.empty(num_rows, dtype=torch.bool, device=device), torch.empty(num_rows, device=device)
    if num_rows:
        best_of_parts_kernel[(num_rows,)](
            parts.peaks, parts.ids, parts.sums, token_ids, is_finite.view(torch.uint8), logprobs, parts.num_ids,
            num_parts, next_power_of_2(num_parts), num_warps=1 if num_parts <= 128 else 4, launch_pdl=True,
        )  # fmt: skip
    return token_ids, is_finite, logprobs


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id [n] int64 of each row's largest logit, the lower of equal ones, and is_finite [n] bool; else id 0."""
    token_ids, is_finite, _ = best_of_parts(_parts_of(logits))
    return token_ids, is_finite


def best_logprobs(logits: Tensor) -> Tensor:
    """The log-probability [n] float32 of each row's likeliest token."""
    return best_of_parts(_parts_of(logits))[2]


def _parts_of(logits: Tensor) -> Parts:
    expect("logits", logits, (None, None), torch.float32)
    num_rows, num_ids = logits.shape
    logits = dense_rows(logits)
    parts = Parts.empty(num_rows, cdiv(num_ids, BEST_PART), num_ids, logits.device)
    if num_rows:
        row_peak_kernel[tuple(parts.peaks.shape)](
            logits, parts.peaks, parts.ids, parts.sums, logits.stride(0), num_ids, parts.peaks.shape[1], BEST_PART,
            num_warps=8, launch_pdl=True,
        )  # fmt: skip
    return parts
