"""Batches and caches as native code sees them: C structs that point into tensors."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from deepinfer.backends.cpu.tensors import LONG, POINTER, dense
from deepinfer.errors import ShapeError
from deepinfer.ops.batch import TokenBatch

T = TypeVar("T")


class BatchStruct(ctypes.Structure):
    """`struct Batch` of native/batch.h."""

    _fields_ = (
        ("positions", POINTER),
        ("row_offsets", POINTER),
        ("row_starts", POINTER),
        ("row_slots", POINTER),
        ("block_table", POINTER),
        ("window_starts", POINTER),
        ("num_tokens", LONG),
        ("num_rows", LONG),
        ("table_columns", LONG),
        ("block_tokens", LONG),
        ("is_block", LONG),
    )


class CacheStruct(ctypes.Structure):
    """`struct Cache` of native/batch.h."""

    _fields_ = (("data", POINTER), ("stride", LONG), ("count", LONG), ("entries", LONG), ("bytes", LONG))


class Attached:
    """Values that belong to objects which do not know of them, such as the C struct of a tensor; they go with it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: Any, make: Callable[[], T]) -> T:
        """The owner's value, made when it is first asked for."""
        key = id(owner)
        found = self._known.get(key)
        if found is None or found[0]() is not owner:
            known = self._known  # the callback must not keep this object
            found = (weakref.ref(owner, lambda _: known.pop(key, None)), make())
            known[key] = found
        return cast(T, found[1])


_caches = Attached()


def batch_address(batch: TokenBatch) -> int:
    """Of the batch's struct, which lives as long as the batch."""
    return cast(int, batch.once("native batch", lambda: _make_batch(batch))[0])


def read_cache(name: str, cache: Tensor, width: int, dtype: torch.dtype = torch.uint8) -> tuple[int, Tensor]:
    """Address of the struct of a cache [slots or blocks, entries, ...], and the tensor that it points into.

    An entry is `width` numbers in any shape. A cache whose entries are spread out is copied.
    """
    struct = _caches.get(cache, lambda: _make_cache(cache))
    if struct is None:
        return read_cache(name, cache.contiguous(), width, dtype)
    if cache.dtype is not dtype or struct.bytes != width * dtype.itemsize:
        raise ShapeError(f"{name} is {cache.dtype} of shape {list(cache.shape)}; it must have {width} {dtype} an entry")
    return ctypes.addressof(struct), cache


def write_cache(name: str, cache: Tensor, width: int, dtype: torch.dtype = torch.uint8) -> int:
    """Address of the struct of a cache that is written to; raises ShapeError when its entries are spread out."""
    address, kept = read_cache(name, cache, width, dtype)
    if kept is not cache:
        raise ShapeError(f"{name} has strides {cache.stride()}; entries of a slot or block must lie side by side")
    return address


def _make_batch(batch: TokenBatch) -> tuple[int, BatchStruct, list[Tensor]]:
    num_tokens, num_rows = batch.num_tokens, len(batch.row_slots)
    num_columns = batch.block_table.shape[1]
    kept = [
        dense("positions", batch.positions, (num_tokens,), torch.int32),
        dense("row offsets", batch.row_offsets, (num_rows + 1,), torch.int32),
        dense("row starts", batch.row_starts, (num_rows,), torch.int32),
        dense("row slots", batch.row_slots, (num_rows,), torch.int32),
        dense("block table", batch.block_table, (num_rows, num_columns), torch.int32),
        dense("window starts", batch.window_starts, (num_rows,), torch.int32),
    ]
    pointers = [tensor.data_ptr() for tensor in kept]
    struct = BatchStruct(*pointers, num_tokens, num_rows, num_columns, batch.block_tokens, batch.is_block)
    return ctypes.addressof(struct), struct, kept


def _make_cache(cache: Tensor) -> CacheStruct | None:
    """None when the entries of a slot or block do not lie side by side."""
    count, entries = cache.shape[:2]
    if count and not cache[0].is_contiguous():
        return None
    width = math.prod(cache.shape[2:]) * cache.itemsize
    return CacheStruct(cache.data_ptr(), cache.stride(0) * cache.itemsize, count, entries, width)
