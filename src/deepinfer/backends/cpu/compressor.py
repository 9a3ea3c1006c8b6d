"""Compressed vectors and index keys of a KV source."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, write_cache
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_BF16, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.projections import MAX_PAIRS
from deepinfer.backends.cpu.tensors import FLOAT, LONG, POINTER, numbers, rows_of
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import CompressorWeights


class CompressorStruct(ctypes.Structure):
    """`struct Compressor` of native/compressor.cpp."""

    _fields_ = (
        ("rows", MatrixStruct),
        ("index_wk", MatrixStruct),
        ("norm", POINTER),
        ("index_norm", POINTER),
        ("frequencies", POINTER),
        ("ratio", LONG),
        ("dim", LONG),
        ("index_dim", LONG),
        ("pairs", LONG),
        ("norm_eps", FLOAT),
        ("index_eps", FLOAT),
    )


@dataclass(frozen=True)
class CpuCompressor:
    """Weights of one KV source; `rows` is wkv [D, H], above ratio 1 with wgate below it [2 * D, H]."""

    rows: Matrix
    index_wk: Matrix
    norm: Tensor
    index_norm: Tensor
    frequencies: Tensor
    struct: CompressorStruct
    address: int
    ratio: int
    dim: int
    index_dim: int


def prepare_compressor(compressor: CompressorWeights) -> CpuCompressor:
    """Pack the weights; key and score rows become one product."""
    require(
        (compressor.wgate is not None) == (compressor.ratio > 1),
        f"a compressor of ratio {compressor.ratio} has wgate only above ratio 1",
    )
    parts = (compressor.wkv,) if compressor.wgate is None else (compressor.wkv, compressor.wgate)
    rows, index_wk = prepare_matrix(*parts, rounding=TO_BF16), prepare_matrix(compressor.index_wk)
    norm, index_norm = numbers(compressor.norm.weight.value), numbers(compressor.index_norm.weight.value)
    frequencies = rope_frequencies(compressor.rope, torch.device("cpu")).contiguous()
    dim, index_dim, pairs = index_wk.columns, index_wk.rows, len(frequencies)
    require(dim % 32 == 0 and index_dim % 32 == 0, f"vectors of {dim} and index keys of {index_dim} are not whole 32s")
    require(rows.rows == len(parts) * dim, f"the compressor has {rows.rows} rows; it must have {len(parts)} x {dim}")
    require(2 * pairs <= min(dim, index_dim) and pairs <= MAX_PAIRS, f"{2 * pairs} rope dimensions are too many")
    struct = CompressorStruct(
        rows.structs[0], index_wk.structs[0], norm.data_ptr(), index_norm.data_ptr(), frequencies.data_ptr(),
        compressor.ratio, dim, index_dim, pairs, compressor.norm.eps, compressor.index_norm.eps,
    )  # fmt: skip
    return CpuCompressor(
        rows, index_wk, norm, index_norm, frequencies, struct, ctypes.addressof(struct),
        compressor.ratio, dim, index_dim,
    )  # fmt: skip


def compress(
    x: Tensor, batch: TokenBatch, compressor: CpuCompressor, state: Tensor | None, pages: Tensor, index_pages: Tensor
) -> None:
    """Write the compressed vectors and index keys of the groups that x [T, H] completes, then the state."""
    ratio, dim, index_dim = compressor.ratio, compressor.dim, compressor.index_dim
    x = rows_of("x", x, compressor.rows.columns)
    require(len(x) == batch.num_tokens, f"x has {len(x)} rows; it must have {batch.num_tokens}")
    per_block = batch.block_tokens // ratio
    expect("compressed pages", pages, (None, per_block, dim // 16 * 9), torch.uint8)
    expect("index pages", index_pages, (len(pages), per_block, index_dim // 32 * 17), torch.uint8)
    state_address = None
    if ratio > 1:
        require(state is not None, f"a compressor of ratio {ratio} needs its state ring")
        assert state is not None
        expect("compressor state", state, (None, None, 2, dim), torch.float32)
        length = state.shape[1]
        require(length >= ratio - 1, f"the state ring holds {length} positions; it must hold {ratio - 1}")
        state_address = write_cache("compressor state", state, 2 * dim, torch.float32)
    native().compress(
        compressor.address, x.data_ptr(), x.stride(0), batch_address(batch), state_address,
        write_cache("compressed pages", pages, dim // 16 * 9),
        write_cache("index pages", index_pages, index_dim // 32 * 17),
    )  # fmt: skip
