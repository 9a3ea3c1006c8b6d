"""The draft head around its blocks; see ops/reference/draft.py for the maths."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cpu.embedding import CpuHead, HeadStruct, head
from deepinfer.backends.cpu.hyper import MAX_STREAMS
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import Matrix, multiply, prepare_matrix
from deepinfer.backends.cpu.tensors import dense, empty, numbers
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import DraftWeights


@dataclass(frozen=True)
class CpuDraft:
    """Projections of the draft head; markov_embed [V, rank] as it is stored."""

    main_proj: Matrix
    main_norm: Tensor
    main_eps: float
    head: CpuHead
    markov_embed: Tensor
    markov_head: Matrix
    confidence: Matrix


def tap(streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H]: [T, H] float32."""
    num_tokens, num_streams, hidden = streams.shape
    require(num_streams <= MAX_STREAMS, f"there are {num_streams} streams; there must be at most {MAX_STREAMS}")
    streams, out = dense("streams", streams, (num_tokens, num_streams, hidden)), empty(num_tokens, hidden)
    native().tap(streams.data_ptr(), num_tokens, num_streams, hidden, out.data_ptr(), hidden)
    return out


def prepare_draft(draft: DraftWeights, head: CpuHead) -> CpuDraft:
    """Pack the weights; the output matrix is the one that `head` holds."""
    norm = numbers(draft.norm.weight.value)
    expect("draft norm", norm, (head.matrix.columns,))
    struct = HeadStruct(head.matrix.structs[0], norm.data_ptr(), draft.norm.eps)
    return CpuDraft(
        main_proj=prepare_matrix(draft.main_proj, rounds=True),
        main_norm=numbers(draft.main_norm.weight.value),
        main_eps=draft.main_norm.eps,
        head=CpuHead(head.matrix, norm, struct, ctypes.addressof(struct)),
        markov_embed=draft.markov_embed.value.contiguous(),
        markov_head=prepare_matrix(draft.markov_head),
        confidence=prepare_matrix(draft.confidence),
    )


def draft_main(taps: Tensor, draft: CpuDraft) -> Tensor:
    """Main vectors [T, H] float32 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None), torch.float32)
    projected = multiply(taps.flatten(1), draft.main_proj)
    return F.rms_norm(projected, draft.main_norm.shape, draft.main_norm, draft.main_eps)


def draft_head(streams: Tensor, pre: Tensor, draft: CpuDraft) -> tuple[Tensor, Tensor]:
    """x [T, H] and logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m]."""
    return (streams * pre.unsqueeze(-1)).sum(1), head(streams, pre, draft.head)


def draft_next(logits: Tensor, x: Tensor, previous: Tensor, draft: CpuDraft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n]."""
    expect("previous", previous, (len(logits),))
    embedded = F.embedding(previous, draft.markov_embed).float()
    confidence = multiply(torch.cat([x, embedded], dim=-1), draft.confidence)[:, 0]
    return multiply(embedded, draft.markov_head).add_(logits), confidence
