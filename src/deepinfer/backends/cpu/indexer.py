"""The indexer: which compressed entries each token attends to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, read_cache
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_FP8, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.projections import MAX_PAIRS
from deepinfer.backends.cpu.tensors import LONG, POINTER, dense, rows_of
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.table import Selection
from deepinfer.ops.weights import IndexerWeights

MAX_DIM = 4096


class IndexerStruct(ctypes.Structure):
    """`struct Indexer` of native/indexer.cpp."""

    _fields_ = (
        ("wq_b", MatrixStruct),
        ("weights_proj", MatrixStruct),
        ("frequencies", POINTER),
        ("heads", LONG),
        ("dim", LONG),
        ("pairs", LONG),
        ("top_k", LONG),
        ("ratio", LONG),
        ("keeps_candidates", LONG),
        ("candidate_blocks", LONG),
        ("candidate_size", LONG),
    )


@dataclass(frozen=True)
class CpuIndexer:
    """Index-query weights of one index source."""

    wq_b: Matrix
    weights_proj: Matrix
    frequencies: Tensor
    struct: IndexerStruct
    address: int
    dim: int
    top_k: int
    ratio: int
    keeps_candidates: bool
    candidate_blocks: int
    candidate_size: int

    def num_entries(self, batch: TokenBatch) -> int:
        """Columns of a selection: no more than any token of the batch can see."""
        return min(self.top_k, self._num_visible(batch))

    def num_kept(self, batch: TokenBatch) -> int:
        """Candidate blocks that a selection keeps."""
        if not self.keeps_candidates:
            return 0
        return min(self.candidate_blocks, -(-self._num_visible(batch) // self.candidate_size))

    def _num_visible(self, batch: TokenBatch) -> int:
        return (batch.max_position + 1) // self.ratio


def prepare_indexer(indexer: IndexerWeights) -> CpuIndexer:
    """Pack the weights."""
    wq_b, weights_proj = prepare_matrix(indexer.wq_b, rounding=TO_FP8), prepare_matrix(indexer.weights_proj)
    heads = indexer.num_heads
    require(wq_b.rows % heads == 0, f"index wq_b has {wq_b.rows} rows; it must be a multiple of its {heads} heads")
    require(weights_proj.rows == heads, f"index weights_proj has {weights_proj.rows} rows; it must have {heads}")
    frequencies = rope_frequencies(indexer.rope, torch.device("cpu")).contiguous()
    dim, pairs = wq_b.rows // heads, len(frequencies)
    require(dim % 32 == 0 and dim <= MAX_DIM, f"index keys have {dim} dimensions; they must be a multiple of 32")
    require(2 * pairs <= dim and pairs <= MAX_PAIRS, f"{2 * pairs} rope dimensions do not fit an index key of {dim}")
    struct = IndexerStruct(
        wq_b.structs[0], weights_proj.structs[0], frequencies.data_ptr(), heads, dim, pairs, indexer.top_k,
        indexer.ratio, indexer.keeps_candidates, indexer.candidate_blocks, indexer.candidate_size,
    )  # fmt: skip
    return CpuIndexer(
        wq_b, weights_proj, frequencies, struct, ctypes.addressof(struct), dim, indexer.top_k, indexer.ratio,
        indexer.keeps_candidates, indexer.candidate_blocks, indexer.candidate_size,
    )  # fmt: skip


def select(
    x: Tensor, low_rank: Tensor, batch: TokenBatch, indexer: CpuIndexer, index_pages: Tensor, candidates: Tensor | None
) -> Selection:
    """The best entries of each token, ascending: n = min(top_k, entries that any token can see) columns.

    When a token's candidates hold fewer than n entries, the lowest of its other visible ones fill
    the rest, as in the reference.
    """
    num_tokens = batch.num_tokens
    x = rows_of("x", x, indexer.weights_proj.columns)
    require(len(x) == num_tokens, f"x has {len(x)} rows; it must have {num_tokens}")
    low_rank = dense("low-rank query", low_rank, (num_tokens, indexer.wq_b.columns))
    width = indexer.dim // 32 * 17
    expect("index pages", index_pages, (None, batch.block_tokens // indexer.ratio, width), torch.uint8)
    num_candidates, given = 0, None
    if candidates is not None:
        expect("candidates", candidates, (num_tokens, None), torch.int32)
        num_candidates, dense_candidates = candidates.shape[1], candidates.contiguous()
        given = dense_candidates.data_ptr()
    entries = torch.empty(num_tokens, indexer.num_entries(batch), dtype=torch.int32)
    num_kept = indexer.num_kept(batch)
    kept = torch.empty(num_tokens, num_kept, dtype=torch.int32)
    address, _kept = read_cache("index pages", index_pages, width)
    native().select_entries(
        indexer.address, x.data_ptr(), x.stride(0), low_rank.data_ptr(), batch_address(batch), address,
        given, num_candidates, batch.max_position, entries.data_ptr(), entries.shape[1], kept.data_ptr(), num_kept,
    )  # fmt: skip
    return Selection(entries, kept if indexer.keeps_candidates else candidates)
