"""The draft head around its blocks: products by the kernels, the small steps between them by torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cuda.hopper.embedding import Head
from deepinfer.backends.cuda.hopper.embedding import head as output_head
from deepinfer.backends.cuda.hopper.linear import linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import DraftWeights


@dataclass(frozen=True)
class Draft:
    """Projections of the draft head; markov_embed [V, rank] bf16."""

    main_proj: Matrix
    main_norm: Norm
    head: Head
    markov_embed: Tensor
    markov_head: Matrix
    confidence: Matrix


def tap(streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H] bf16: [T, H] bf16."""
    expect("streams", streams, (None, None, None), torch.bfloat16)
    return streams.float().mean(1).to(torch.bfloat16)


def prepare_draft(draft: DraftWeights, head: Head) -> Draft:
    """Pack the weights; the output matrix is the one that `head` holds."""
    return Draft(
        main_proj=prepare_matrix(draft.main_proj),
        main_norm=prepare_norm(draft.main_norm),
        head=dataclasses.replace(head, norm=prepare_norm(draft.norm)),
        markov_embed=draft.markov_embed.value,
        markov_head=prepare_matrix(draft.markov_head, dtype=torch.float32),
        confidence=prepare_matrix(draft.confidence, dtype=torch.float32),
    )


def draft_main(taps: Tensor, draft: Draft) -> Tensor:
    """Main vectors [T, H] bf16 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None))
    projected = linear(taps.flatten(1).to(torch.bfloat16), draft.main_proj).float()
    weight = draft.main_norm.weight
    return F.rms_norm(projected, weight.shape, weight, draft.main_norm.eps).to(torch.bfloat16)


def draft_head(streams: Tensor, pre: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """x [T, H] bf16 and logits [T, V] float32 of streams [T, m, H] bf16 collapsed with pre [T, m]."""
    x = (streams.float() * pre.unsqueeze(-1)).sum(1).to(torch.bfloat16)
    return x, output_head(streams, pre, draft.head)


def draft_next(logits: Tensor, x: Tensor, previous: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n] float32."""
    expect("previous", previous, (len(logits),))
    embedded = F.embedding(previous, draft.markov_embed)
    confidence = linear(torch.cat([x, embedded], dim=-1), draft.confidence)[:, 0]
    return logits + linear(embedded, draft.markov_head), confidence
