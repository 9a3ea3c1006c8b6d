"""The draw in one pass over the logits, without asking the device which rows are random.

A row is cut into parts of one fixed size. The noise of an id is that of `ops/reference/sample.py`: SplitMix64 of (seed,
position, id), and the logarithms are those of float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect

PART = 2048  # ids


@triton.jit
def mixed(x):
    """The finaliser of SplitMix64 on uint64, wrapping."""
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def best_kernel(
    logits, temperature, seeds, positions, scores, ids, row_stride, num_ids, num_parts, PART: tl.constexpr
):  # fmt: skip
    """The best score of one part of a row, and the lowest id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    is_id = token < num_ids
    score = tl.load(logits + row * row_stride + token, mask=is_id, other=float("-inf")).to(tl.float64)
    heat = tl.load(temperature + row).to(tl.float64)
    if heat > 0:
        gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
        key = mixed(mixed(seed + gamma) + position * gamma)
        bits = mixed(key + (token + 1).to(tl.uint64) * gamma) >> 12
        chance = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
        score = score / heat - tl.log(-tl.log(chance))
    best = tl.max(score, 0)
    tl.store(scores + row * num_parts + part, best)
    tl.store(ids + row * num_parts + part, tl.min(tl.where(is_id & (score == best), token, num_ids), 0))


@triton.jit
def choose_kernel(scores, ids, chosen, num_ids, num_parts, PARTS: tl.constexpr):
    """The best part of one row; id 0 where no score is a number."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    is_part = part < num_parts
    score = tl.load(scores + row * num_parts + part, mask=is_part, other=float("-inf"))
    token = tl.load(ids + row * num_parts + part, mask=is_part, other=num_ids)
    token = tl.min(tl.where(score == tl.max(score, 0), token, num_ids), 0)
    tl.store(chosen + row, tl.where(token < num_ids, token, 0).to(tl.int64))


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax(logits / temperature + noise) per row [n] int64, ties to the lower id; temperature 0: no noise."""
    expect("logits", logits, (None, None), torch.float32)
    num_rows, num_ids = logits.shape
    expect("temperature", temperature, (num_rows,), torch.float32)
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        expect(name, tensor, (num_rows,), torch.int64)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
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
