"""Token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cuda.hopper.hyper import collapse_kernel
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import HeadWeights, Weight


@dataclass(frozen=True)
class Embedding:
    """The table [V, H] bf16, and the first weights of the streams [m]."""

    table: Tensor
    first_stream: Tensor


@dataclass(frozen=True)
class Head:
    """Final norm and output matrix."""

    norm: Norm
    matrix: Matrix


def prepare_embedding(weight: Weight, num_streams: int) -> Embedding:
    """Keep the table as it is stored, [V, H] bf16."""
    expect("embedding", weight.value, (None, None), torch.bfloat16)
    return Embedding(weight.value, torch.eye(1, num_streams, device=weight.value.device)[0])


def embed(tokens: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
    """tokens [T] int64 -> streams [T, m, H] bf16, all equal, and pre [T, m], one-hot on stream 0."""
    expect("tokens", tokens, (None,))
    num_streams, x = len(embedding.first_stream), F.embedding(tokens, embedding.table)
    return x.unsqueeze(1).expand(-1, num_streams, -1).contiguous(), embedding.first_stream.repeat(len(tokens), 1)


def prepare_head(head: HeadWeights) -> Head:
    """Widen the norm; the matrix stays bf16."""
    return Head(prepare_norm(head.norm), prepare_matrix(head.weight, dtype=torch.float32))


def head(streams: Tensor, pre: Tensor, head: Head) -> Tensor:
    """logits [T, V] float32 of streams [T, m, H] bf16 collapsed with pre [T, m]."""
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
    return linear(x, head.matrix)
