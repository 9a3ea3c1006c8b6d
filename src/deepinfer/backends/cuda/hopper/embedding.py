"""Token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.hyper import collapse_kernel
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm
from deepinfer.backends.cuda.hopper.sizes import cdiv, next_power_of_2
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import HeadWeights, Weight


@dataclass(frozen=True)
class Embedding:
    """The table [V, H] bf16, and how many streams begin with its rows."""

    table: Tensor
    num_streams: int


@dataclass(frozen=True)
class Head:
    """Final norm and output matrix."""

    norm: Norm
    matrix: Matrix


def prepare_embedding(weight: Weight, num_streams: int) -> Embedding:
    """Keep the table as it is stored, [V, H] bf16."""
    expect("embedding", weight.value, (None, None), torch.bfloat16)
    return Embedding(weight.value.contiguous(), num_streams)


@triton.jit
def embed_kernel(
    tokens, table, streams, pre, num_ids,
    HIDDEN: tl.constexpr, STREAMS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Columns of one token's row into all its streams."""
    begin()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, stream = part * TILE + tl.arange(0, TILE), tl.arange(0, PADDED)
    row, is_column = tl.load(tokens + token), column < HIDDEN
    value = tl.load(table + row * HIDDEN + column, mask=is_column & (row >= 0) & (row < num_ids), other=0.0)
    for place in tl.static_range(STREAMS):
        tl.store(streams + (token * STREAMS + place) * HIDDEN + column, value, mask=is_column)
    first = tl.where(stream == 0, 1.0, 0.0)
    tl.store(pre + token * STREAMS + stream, first, mask=(stream < STREAMS) & (part == 0))


def embed(tokens: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
    """tokens [T] int64 -> streams [T, m, H] bf16, all equal, and pre [T, m], one-hot on stream 0."""
    expect("tokens", tokens, (None,), torch.int64)
    (num_ids, hidden), m, num_tokens = embedding.table.shape, embedding.num_streams, len(tokens)
    streams = torch.empty(num_tokens, m, hidden, dtype=torch.bfloat16, device=tokens.device)
    pre = torch.empty(num_tokens, m, device=tokens.device)
    tile = min(1024, next_power_of_2(hidden))
    if num_tokens:
        embed_kernel[(num_tokens, cdiv(hidden, tile))](
            tokens.contiguous(), embedding.table, streams, pre, num_ids, hidden, m, next_power_of_2(m), tile,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return streams, pre


def prepare_head(head: HeadWeights) -> Head:
    """Widen the norm; the matrix stays bf16."""
    return Head(prepare_norm(head.norm), prepare_matrix(head.weight, dtype=torch.float32))


def head(streams: Tensor, pre: Tensor, head: Head, out: Tensor | None = None) -> Tensor:
    """logits [T, V] float32 of streams [T, m, H] bf16 collapsed with pre [T, m], in `out` if it is given."""
    hidden = len(head.norm.weight)
    expect("streams", streams, (None, None, hidden), torch.bfloat16)
    expect("pre", pre, tuple(streams.shape[:2]), torch.float32)
    num_tokens, m = pre.shape
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=pre.device)
    if num_tokens:
        collapse_kernel[(num_tokens,)](
            streams.contiguous(), pre.contiguous(), head.norm.weight, head.norm.eps, x,
            hidden, m, next_power_of_2(hidden), num_warps=8, launch_pdl=True,
        )  # fmt: skip
    return linear(x, head.matrix, out)
