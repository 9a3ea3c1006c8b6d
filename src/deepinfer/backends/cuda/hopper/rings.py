"""Writing a step's values into the rings of their slots, without asking the device how many there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect


@triton.jit
def write_ring_kernel(
    values, ring, positions, rows, row_offsets, row_starts, row_slots,
    length, slot_stride, num_slots, NUMBERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One token's value to its place in the ring, if it is among the last `length` of its row."""
    begin()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    slot = tl.load(row_slots + row)
    position = tl.load(positions + token)
    end = tl.load(row_starts + row) + tl.load(row_offsets + row + 1) - tl.load(row_offsets + row)
    if (slot > 0) & (slot < num_slots) & (position >= end - length):
        column = tl.arange(0, TILE)
        value = tl.load(values + token * NUMBERS + column, mask=column < NUMBERS)
        at = ring + slot.to(tl.int64) * slot_stride + (position % length).to(tl.int64) * NUMBERS + column
        tl.store(at, value, mask=column < NUMBERS)


def write_ring(ring: Tensor, values: Tensor, batch: TokenBatch) -> None:
    """Write each row's last `length` values at position % length; the padding slot 0 is left alone.

    ring [slots, length, ...], dense but for its slots, is changed in place; values [T, ...] of the same dtype.
    """
    expect("ring values", values, (batch.num_tokens, *ring.shape[2:]), ring.dtype)
    if not batch.num_tokens:
        return
    values = values.contiguous()
    numbers = values[0].numel()
    if ring.dtype == torch.float32:
        ring, values = ring.view(torch.int32), values.view(torch.int32)
    write_ring_kernel[(batch.num_tokens,)](
        values, ring, batch.positions, batch.rows, batch.row_offsets, batch.row_starts, batch.row_slots,
        ring.shape[1], ring.stride(0), ring.shape[0], numbers, next_power_of_2(numbers), num_warps=4, launch_pdl=True,
    )  # fmt: skip
