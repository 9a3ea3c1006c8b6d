"""A whole pass through a model: what it holds, and the order in which it calls its ops.

A backend may run it as one op; `run_model` here is what such an op must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.ops.batch import Computed, ForwardBatch, Hidden
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState

if TYPE_CHECKING:
    from deepinfer.ops.table import Ops


@dataclass(frozen=True)
class ModelParts:
    """What the prepare ops made of a model's weights, its layers with their caches, and its token ring.

    ngrams: None = no layer has an engram. token_ring: [slots, length] int32.
    """

    embedding: Any
    ngrams: Any
    layers: Sequence[BoundLayer]
    head: Any
    token_ring: Tensor


def run_model(ops: Ops, inputs: ForwardBatch, taps: Tensor | None, num_lines: int, model: ModelParts) -> Computed:
    """All tokens through all layers, then the head; `model.layers` are prepared ones here."""
    state, shared = enter_model(ops, inputs, taps, model)
    return leave_model(ops, ops.run_layers(state, shared, model.layers), inputs, num_lines, model)


def enter_model(
    ops: Ops, inputs: ForwardBatch, taps: Tensor | None, parts: ModelParts
) -> tuple[LayerState, LayerInputs]:
    """Up to the first layer; the tokens are in their rings then."""
    batch, ngram_rows = inputs.encoder, None
    if parts.ngrams is not None:
        ngram_rows = ops.ngram_rows(inputs.tokens, batch, parts.token_ring, parts.ngrams)
    ops.store_tokens(inputs.tokens, batch, parts.token_ring)
    streams, pre = ops.embed(inputs.tokens, parts.embedding)
    if inputs.image_rows is not None:
        streams = streams.contiguous()
        streams[inputs.is_image] = inputs.image_rows.unsqueeze(1).to(streams.dtype)
    return LayerState(streams, pre, None), LayerInputs(batch, ngram_rows, inputs.is_image, taps)


def leave_model(ops: Ops, state: LayerState, inputs: ForwardBatch, num_lines: int, parts: ModelParts) -> Computed:
    """From the last layer on: the logits of the first `num_lines` logit tokens."""
    chosen = inputs.logit_tokens
    hidden = Hidden(state.streams, state.pre) if chosen is None else Hidden(state.streams[chosen], state.pre[chosen])
    lines = hidden.part(0, num_lines)
    logits = ops.head(lines.streams, lines.pre, parts.head, inputs.logits)
    return Computed(hidden if len(hidden.pre) > num_lines else None, logits, ops.best_tokens(logits))
