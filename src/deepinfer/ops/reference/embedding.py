"""Token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference.hyper import collapse
from deepinfer.ops.reference.linear import Linear, multiply, prepare_linear
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import HeadWeights, Weight


@dataclass(frozen=True)
class Embedding:
    """The table [V, H] as it is stored, and the first weights of the streams [m]."""

    table: Tensor
    first_stream: Tensor


@dataclass(frozen=True)
class Head:
    """Final norm and output matrix."""

    norm: Norm
    matrix: Linear


def prepare_embedding(numerics: Numerics, weight: Weight, num_streams: int) -> Embedding:
    """Keep the table as it is stored, [V, H] bf16."""
    expect("embedding", weight.value, (None, None))
    return Embedding(weight.value, torch.eye(1, num_streams, device=weight.value.device)[0])


def embed(numerics: Numerics, tokens: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
    """tokens [T] int64 -> streams [T, m, H] float32, all equal, and pre [T, m], one-hot on stream 0."""
    expect("tokens", tokens, (None,))
    num_streams, x = len(embedding.first_stream), F.embedding(tokens, embedding.table).float()
    return x.unsqueeze(1).expand(-1, num_streams, -1), embedding.first_stream.expand(len(tokens), -1)


def prepare_head(numerics: Numerics, head: HeadWeights) -> Head:
    """Widen norm and matrix; a large matrix stays bf16 and is widened a slice at a time."""
    return Head(prepare_norm(head.norm), prepare_linear(numerics, head.weight))


def head(numerics: Numerics, streams: Tensor, pre: Tensor, head: Head, out: Tensor | None = None) -> Tensor:
    """logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m], in `out` if it is given."""
    expect("streams", streams, (None, None, head.norm.weight.shape[0]))
    expect("pre", pre, streams.shape[:2])
    logits = multiply(numerics, rms_norm(numerics, collapse(numerics, streams, pre), head.norm), head.matrix)
    return logits if out is None else out.copy_(logits)
