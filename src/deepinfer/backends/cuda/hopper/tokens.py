"""The token ring, and what is kept of the tokens drawn, without asking the device how many there are of anything."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.rings import write_ring
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect

PLACES = 8  # drafts that are compared at a time


def store_tokens(tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    expect("tokens", tokens, (batch.num_tokens,))
    expect("token ring", ring, (None, None))
    write_ring(ring, tokens.to(ring.dtype), batch)


@triton.jit
def verify_kernel(
    token_ids, is_usable, row_offsets, row_starts, row_slots, ring, newest, positions,
    length, ring_stride, num_slots, PLACES: tl.constexpr,
):  # fmt: skip
    """One row: what it keeps ends at the first token that is no draft of it."""
    begin()
    row, place = tl.program_id(0), tl.arange(0, PLACES)
    offset, checked = tl.load(row_offsets + row), tl.load(row_offsets + row + 1) - tl.load(row_offsets + row) - 1
    slot, start = tl.load(row_slots + row), tl.load(row_starts + row)
    is_real = (slot > 0) & (slot < num_slots)
    own = ring + tl.where(is_real, slot, 0).to(tl.int64) * ring_stride
    accepted = 0
    for first in range(0, checked, PLACES):
        at = first + place
        is_draft = at < checked
        drawn = tl.load(token_ids + offset + at, mask=is_draft, other=0)
        usable = tl.load(is_usable + offset + at, mask=is_draft, other=1)
        draft = tl.load(own + (start + 1 + at) % length, mask=is_draft, other=0)
        differs = is_draft & ((drawn != draft.to(tl.int64)) | (usable == 0))
        agreed = tl.minimum(tl.min(tl.where(differs, at, checked), 0), first + PLACES)
        accepted = tl.where(accepted == first, agreed, accepted)
    token, position = tl.load(token_ids + offset + accepted).to(tl.int32), start + 1 + accepted
    tl.store(own + position % length, token, mask=is_real)
    tl.store(newest + row, token)
    tl.store(positions + row, position)


def verify(token_ids: Tensor, is_usable: Tensor, batch: TokenBatch, ring: Tensor, newest: Tensor) -> None:
    """Write the newest token of each row [rows], once its drafts are checked, and its position: [2, rows] int32."""
    expect("token_ids", token_ids, (None,), torch.int64)
    expect("is_usable", is_usable, token_ids.shape, torch.bool)
    expect("token ring", ring, (None, None), torch.int32)
    expect("newest", newest, (2, None), torch.int32)
    if newest.shape[1]:
        verify_kernel[(newest.shape[1],)](
            token_ids.contiguous(), is_usable.contiguous().view(torch.uint8), batch.row_offsets, batch.row_starts,
            batch.row_slots, ring, newest[0], newest[1], ring.shape[1], ring.stride(0), len(ring), PLACES,
            num_warps=1, launch_pdl=True,
        )  # fmt: skip
