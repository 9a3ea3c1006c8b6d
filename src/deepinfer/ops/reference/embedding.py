"""Token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference.hyper import collapse
from deepinfer.ops.reference.linear import Linear, multiply, prepare_linear
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import HeadWeights, Weight


@dataclass(frozen=True)
class Head:
    """Final norm and output matrix."""

    norm: Norm
    matrix: Linear


def prepare_embedding(numerics: Numerics, weight: Weight) -> Tensor:
    """The table as it is stored, [V, H] bf16."""
    expect("embedding", weight.value, (None, None))
    return weight.value


def embed(numerics: Numerics, tokens: Tensor, embedding: Tensor) -> Tensor:
    """tokens [T] int -> [T, H] float32."""
    expect("tokens", tokens, (None,))
    return F.embedding(tokens.long(), embedding).float()


def prepare_head(numerics: Numerics, head: HeadWeights) -> Head:
    """Widen norm and matrix; a large matrix stays bf16 and is widened a slice at a time."""
    return Head(prepare_norm(head.norm), prepare_linear(numerics, head.weight))


def head(numerics: Numerics, streams: Tensor, pre: Tensor, head: Head) -> Tensor:
    """logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m]."""
    expect("streams", streams, (None, None, head.norm.weight.shape[0]))
    expect("pre", pre, streams.shape[:2])
    return multiply(numerics, rms_norm(numerics, collapse(numerics, streams, pre), head.norm), head.matrix)
