"""The draft head around its blocks: what it reads of the backbone, and what it makes of its last block.

Source: architecture page, DSpark draft.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference.embedding import Head
from deepinfer.ops.reference.hyper import collapse
from deepinfer.ops.reference.linear import Linear, linear, multiply, prepare_linear
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.sample import best_logprobs, best_tokens
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.weights import DraftWeights


@dataclass(frozen=True)
class Draft:
    """Projections of the draft head; markov_embed [V, rank] as it is stored."""

    main_proj: Linear
    main_norm: Norm
    head: Head
    markov_embed: Tensor
    markov_head: Linear
    confidence: Linear


def tap(numerics: Numerics, streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H]: [T, H] float32."""
    expect("streams", streams, (None, None, None))
    return numerics.act(streams.mean(1))


def prepare_draft(numerics: Numerics, draft: DraftWeights, head: Head) -> Draft:
    """Widen the weights; the output matrix is the one that `head` holds."""
    return Draft(
        main_proj=prepare_linear(numerics, draft.main_proj),
        main_norm=prepare_norm(draft.main_norm),
        head=dataclasses.replace(head, norm=prepare_norm(draft.norm)),
        markov_embed=draft.markov_embed.value,
        markov_head=prepare_linear(numerics, draft.markov_head),
        confidence=prepare_linear(numerics, draft.confidence),
    )


def draft_main(numerics: Numerics, taps: Tensor, draft: Draft) -> Tensor:
    """Main vectors [T, H] float32 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None), torch.float32)
    return rms_norm(numerics, linear(numerics, taps.flatten(1), draft.main_proj), draft.main_norm)


def draft_head(numerics: Numerics, streams: Tensor, pre: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """x [T, H] and logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m]."""
    expect("pre", pre, streams.shape[:2])
    x = collapse(numerics, streams, pre)
    return x, multiply(numerics, rms_norm(numerics, x, draft.head.norm), draft.head.matrix)


def draft_next(numerics: Numerics, logits: Tensor, x: Tensor, previous: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n]."""
    expect("previous", previous, (len(logits),))
    embedded = F.embedding(previous, draft.markov_embed).float()
    confidence = multiply(numerics, torch.cat([x, embedded], dim=-1), draft.confidence)[:, 0]
    return logits + multiply(numerics, embedded, draft.markov_head), confidence


def draft_likeliest(
    numerics: Numerics, logits: Tensor, x: Tensor, previous: Tensor, draft: Draft
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens [n] int64 of such logits, their log-probabilities and the raw confidences [n]."""
    row, confidence = draft_next(numerics, logits, x, previous, draft)
    return best_tokens(numerics, row)[0], best_logprobs(numerics, row), confidence
