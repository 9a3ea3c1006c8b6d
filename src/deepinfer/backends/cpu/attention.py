"""Attention over packed keys: this step's window rows, the ring before them, and the selected compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, read_cache, write_cache
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.projections import CpuAttention
from deepinfer.backends.cpu.tensors import dense
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect, require


def attend(
    q: Tensor,
    window_rows: Tensor,
    batch: TokenBatch,
    ring: Tensor,
    pages: Tensor | None,
    entries: Tensor | None,
    attention: CpuAttention,
) -> Tensor:
    """Softmax over window, entries and sink, then the inverse rotation: [T, h, D] float32.

    Entries that are negative or lie past the row's blocks count as none.
    """
    num_tokens, dim, window = batch.num_tokens, attention.dim, attention.window
    q = dense("q", q, (num_tokens, attention.num_heads, dim))
    window_rows = dense("window rows", window_rows, (num_tokens, dim // 32 * 33), torch.uint8)
    ring_address, ring = read_cache("window ring", ring, dim // 32 * 33)
    require(ring.shape[1] >= window - 1, f"the window ring holds {ring.shape[1]} positions; it must hold {window - 1}")
    require((pages is None) == (entries is None), "pages and entries are given together or not at all")
    pages_address, chosen, num_entries = None, None, 0
    if pages is not None and entries is not None:
        pages_address, pages = read_cache("compressed pages", pages, dim // 16 * 9)
        expect("entries", entries, (num_tokens, None), torch.int32)
        entries, num_entries = entries.contiguous(), entries.shape[1]
        chosen = entries.data_ptr()
    out = torch.empty(num_tokens, attention.num_heads, dim)
    native().attend(
        batch_address(batch), q.data_ptr(), window_rows.data_ptr(), ring_address, pages_address, chosen, num_entries,
        attention.sink.data_ptr(), attention.frequencies.data_ptr(), attention.num_heads, dim, window,
        len(attention.frequencies), out.data_ptr(),
    )  # fmt: skip
    return out


def store_window(window_rows: Tensor, batch: TokenBatch, ring: Tensor) -> None:
    """Write each row's last `length` window rows into its slot's ring."""
    num_tokens, width = batch.num_tokens, ring.shape[-1]
    window_rows = dense("window rows", window_rows, (num_tokens, width), torch.uint8)
    native().store_ring(batch_address(batch), window_rows.data_ptr(), write_cache("window ring", ring, width))
