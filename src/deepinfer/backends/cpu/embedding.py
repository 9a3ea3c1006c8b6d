"""Token embedding and output head."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native, short_native
from deepinfer.backends.cpu.matrix import Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, POINTER, dense, empty, numbers, result
from deepinfer.errors import ShapeError
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import HeadWeights, Weight


class HeadStruct(ctypes.Structure):
    """`struct Head` of native/embedding.cpp."""

    _fields_ = (("matrix", MatrixStruct), ("norm", POINTER), ("eps", FLOAT))


@dataclass(frozen=True)
class CpuEmbedding:
    """The table [V, H] bf16."""

    table: Tensor
    num_streams: int


@dataclass(frozen=True)
class CpuHead:
    """Final norm and output matrix."""

    matrix: Matrix
    norm: Tensor
    struct: HeadStruct
    address: int


def prepare_embedding(weight: Weight, num_streams: int) -> CpuEmbedding:
    """Keep the table as it is stored, [V, H] bf16."""
    expect("embedding", weight.value, (None, None), torch.bfloat16)
    return CpuEmbedding(weight.value.contiguous(), num_streams)


def embed(tokens: Tensor, embedding: CpuEmbedding) -> tuple[Tensor, Tensor]:
    """tokens [T] int64 -> streams [T, m, H] float32, all equal, and pre [T, m], one-hot on stream 0.

    Raises ShapeError for a token that the table does not have.
    """
    num_tokens, num_streams = tokens.shape[0], embedding.num_streams
    tokens = dense("tokens", tokens, (num_tokens,), torch.int64)
    vocabulary, hidden = embedding.table.shape
    streams, pre = empty(num_tokens, num_streams, hidden), empty(num_tokens, num_streams)
    if short_native().embed(
        tokens.data_ptr(), num_tokens, embedding.table.data_ptr(), vocabulary, hidden, num_streams,
        streams.data_ptr(), pre.data_ptr(),
    ):  # fmt: skip
        raise ShapeError(f"tokens reach from {tokens.min()} to {tokens.max()}; they must be ids below {vocabulary}")
    return streams, pre


def prepare_head(head: HeadWeights) -> CpuHead:
    """Pack norm and matrix."""
    matrix, norm = prepare_matrix(head.weight), numbers(head.norm.weight.value)
    expect("head norm", norm, (matrix.columns,))
    struct = HeadStruct(matrix.structs[0], norm.data_ptr(), head.norm.eps)
    return CpuHead(matrix, norm, struct, ctypes.addressof(struct))


def head(streams: Tensor, pre: Tensor, head: CpuHead, out: Tensor | None = None) -> Tensor:
    """logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m], in `out`, dense, if it is given."""
    num_tokens, num_streams, _ = streams.shape
    streams = dense("streams", streams, (num_tokens, num_streams, head.matrix.columns))
    pre = dense("pre", pre, (num_tokens, num_streams))
    out = result("logits", out, (num_tokens, head.matrix.rows))
    native().head(head.address, streams.data_ptr(), pre.data_ptr(), num_tokens, num_streams, out.data_ptr())
    return out
