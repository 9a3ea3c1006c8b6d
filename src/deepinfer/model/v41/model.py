"""DeepSeek-V4.1: a causal encoder and a decoder half in one stack of layers, over paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.pools import CachePools
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.draft import BoundDraft, Draft
from deepinfer.model.v41.layer import layer_caches, prepare_layer
from deepinfer.model.v41.vision import VisionTower
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import Computed, ForwardBatch, Hidden
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState, enter_layer, keep_tokens, leave_layer
from deepinfer.ops.model import ModelParts, enter_model, leave_model
from deepinfer.ops.table import Ops


class Model:
    """Prepared weights of backbone and image encoder and, if it is to draft, the draft head; stateless but for them.

    Weights are read from `weights` layer by layer and handed to the ops' `prepare_*`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: ModelWeights, *, drafts: bool = False):
        self.config, self.ops = config, ops
        self.embedding = ops.prepare_embedding(weights.embedding(), config.num_streams)
        self.ngrams = ops.prepare_ngrams(weights.ngrams()) if config.engram is not None else None
        targets = config.draft.target_layers if drafts and config.draft is not None else ()
        places = {layer: place for place, layer in enumerate(targets)}
        self.layers = [prepare_layer(plan, ops, weights, places.get(plan.index)) for plan in config.layers]
        self.head = ops.prepare_head(weights.head())
        self.draft = Draft(config, ops, weights, self.embedding, self.head) if drafts else None
        self.vision = VisionTower(config.vision, ops, weights) if config.vision is not None else None

    def bind(self, pools: CachePools) -> BoundModel:
        """The model over one set of caches."""
        return BoundModel(self, pools)


class BoundModel:
    """A model and the caches it reads and writes."""

    def __init__(self, model: Model, pools: CachePools):
        self.model, self.pools = model, pools
        ops, boundary = model.ops, model.config.boundary
        layers = [
            BoundLayer(parts, layer_caches(plan, pools))
            for plan, parts in zip(model.config.layers, model.layers, strict=True)
        ]
        self.boundary_layer = layers[boundary] if boundary < len(layers) else None
        self.token_ring = pools.numbers("tokens", torch.int32).squeeze(-1)  # [slots, length]
        self.parts = ModelParts(model.embedding, model.ngrams, layers, model.head, self.token_ring)
        self.whole = ops.prepare_model(self.parts)
        self.layers_below = ops.prepare_layers(layers[:boundary])
        self.layers_above = ops.prepare_layers(layers[boundary + 1 :])
        self.window = model.config.window
        self.draft = BoundDraft(model.draft, pools) if model.draft is not None else None

    def compute(self, inputs: ForwardBatch, num_lines: int) -> Computed:
        """The logits of the first `num_lines` logit tokens; writes the step's entries into all caches.

        Every token passes the layers below the boundary and the boundary layer's compressor. What
        lies above reads global entries that are complete by then and the window vectors of its
        own layers only, so tokens before a request's decoder start stop there.
        """
        ops, taps = self.model.ops, None
        if self.draft is not None and inputs.feeds_draft:
            taps = self.draft.new_taps(inputs.encoder.num_tokens, self.model.config.hidden_size, inputs.tokens.device)
        if inputs.decoder is inputs.encoder:
            computed = ops.run_model(inputs, taps, num_lines, self.whole)
        else:
            state, shared = enter_model(ops, inputs, taps, self.parts)
            state, taps = self._run_halves(state, shared, inputs)
            computed = leave_model(ops, state, inputs, num_lines, self.parts)
        if self.draft is not None and taps is not None and inputs.decoder.num_tokens:
            self.draft.store_main(taps, inputs.decoder)
        return computed

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits [tokens, vocab] float32."""
        return self.model.ops.head(hidden.streams, hidden.pre, self.model.head, None)

    def _run_halves(
        self, state: LayerState, shared: LayerInputs, inputs: ForwardBatch
    ) -> tuple[LayerState, Tensor | None]:
        """The decoder's tokens after all layers, and their taps."""
        ops, kept, boundary = self.model.ops, inputs.decoder_tokens, self.boundary_layer
        state = ops.run_layers(state, shared, self.layers_below)
        if boundary is None:
            if kept is None:
                return state, shared.taps
            taps = None if shared.taps is None else shared.taps[kept]
            return LayerState(state.streams[kept], state.pre[kept], None), taps
        entered = enter_layer(ops, boundary, state, shared)
        if kept is not None and not len(kept):
            return LayerState(entered.streams[:0], entered.mix.pre[:0], None), None
        entered, shared = keep_tokens(entered, shared, kept, inputs.decoder)
        return ops.run_layers(leave_layer(ops, boundary, entered, shared), shared, self.layers_above), shared.taps
