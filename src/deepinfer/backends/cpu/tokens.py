"""The token ring of each slot, the block table, and the likeliest tokens.

Small things. Unlike torch's ops, and numpy's when an array is an index, they do not let go of the GIL.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, read_cache, write_cache
from deepinfer.backends.cpu.library import short_native
from deepinfer.backends.cpu.tensors import dense, empty
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Int32


def store_tokens(tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` tokens [T] int into its slot's token ring [slots, length] int32."""
    narrow = torch.from_numpy(tokens.numpy().astype(np.int32))
    tokens = dense("tokens", narrow, (batch.num_tokens,), torch.int32)
    expect("token ring", ring, (None, None))
    short_native().store_ring(batch_address(batch), tokens.data_ptr(), write_cache("token ring", ring, 1, torch.int32))


def read_tokens(ring: Tensor, slots: Int32, positions: Int32) -> Tensor:
    """Tokens [n] int64 at these positions of their slots in the ring [slots, length] int32."""
    address, _kept = read_cache("token ring", ring, 1, torch.int32)
    out, own = empty(len(slots), dtype=np.int64), _places(slots, positions)
    short_native().read_tokens(address, own[0].data_ptr(), own[1].data_ptr(), len(slots), out.data_ptr())
    return out


def write_tokens(token_ids: Tensor, ring: Tensor, slots: Int32, positions: Int32) -> None:
    """Put tokens [n] int64 there."""
    address, own = write_cache("token ring", ring, 1, torch.int32), _places(slots, positions)
    token_ids = dense("tokens", token_ids, (len(slots),), torch.int64)
    short_native().write_tokens(address, own[0].data_ptr(), own[1].data_ptr(), len(slots), token_ids.data_ptr())


def read_table(table: Tensor, slots: Int32, columns: int) -> Tensor:
    """The first `columns` entries of these slots' lines [n, columns]."""
    require(table.dtype is torch.int32 and table.stride(1) == 1, "a block table is int32, its lines are dense")
    columns = min(columns, table.shape[1])
    out, own = (
        empty(len(slots), columns, dtype=np.int32),
        dense("slots", torch.from_numpy(slots), (len(slots),), torch.int32),
    )
    short_native().read_table(table.data_ptr(), table.stride(0), own.data_ptr(), len(slots), columns, out.data_ptr())
    return out


def _places(slots: Int32, positions: Int32) -> tuple[Tensor, Tensor]:
    """The two arrays as tensors."""
    shape = slots.shape
    return (
        dense("slots", torch.from_numpy(slots), shape, torch.int32),
        dense("positions", torch.from_numpy(positions), shape, torch.int32),
    )


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id [n] int64 of each row's largest logit, the lower of equal ones, and is_finite [n] bool; else id 0."""
    expect("logits", logits, (None, None), torch.float32)
    logits, num_rows = logits.contiguous(), logits.shape[0]
    token_ids, is_finite = empty(num_rows, dtype=np.int64), empty(num_rows, dtype=np.bool_)
    short_native().best_tokens(logits.data_ptr(), num_rows, logits.shape[1], token_ids.data_ptr(), is_finite.data_ptr())
    return token_ids, is_finite


def best_logprobs(logits: Tensor) -> Tensor:
    """The log-probability [n] float32 of each row's likeliest token."""
    values = logits.numpy()
    with np.errstate(invalid="ignore"):  # a row of -inf gives NaN
        shares = np.exp(values - values.max(axis=1, keepdims=True))
    return torch.from_numpy(-np.log(shares.sum(axis=1)))
