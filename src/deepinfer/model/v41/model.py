"""DeepSeek-V4.1: a causal encoder and a decoder half in one stack of layers, over paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.pools import CachePools
from deepinfer.model.v41.attention import AttentionCaches
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.layer import Layer
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import ForwardBatch
from deepinfer.ops.table import Mix, Ops, Selection


class Model:
    """Prepared weights of the whole backbone; stateless but for them.

    Weights are read from `weights` layer by layer and handed to the ops' `prepare_*`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: ModelWeights):
        self.config, self.ops = config, ops
        self.embedding = ops.prepare_embedding(weights.embedding())
        self.ngrams = ops.prepare_ngrams(weights.ngrams()) if config.engram is not None else None
        self.layers = [Layer(plan, ops, weights) for plan in config.layers]
        self.head = ops.prepare_head(weights.head())

    def bind(self, pools: CachePools) -> BoundModel:
        """The model over one set of caches."""
        return BoundModel(self, pools)


class BoundModel:
    """A model and the caches it reads and writes."""

    def __init__(self, model: Model, pools: CachePools):
        self.model, self.pools = model, pools
        self.caches = [AttentionCaches(layer.plan, pools) for layer in model.layers]
        self.token_ring = pools.numbers("tokens", torch.int32).squeeze(-1)  # [slots, length]

    def forward(self, inputs: ForwardBatch) -> Tensor:
        """Logits [len(logit_tokens), vocab] float32; writes the step's entries into all caches.

        Every token passes the layers below the boundary and the boundary layer's compressor. What
        lies above reads global entries that are complete by then and the window vectors of its
        own layers only, so tokens before a request's decoder start stop there.
        """
        model, ops, batch = self.model, self.model.ops, inputs.encoder
        is_image, ngram_rows = inputs.is_image, None
        if model.ngrams is not None:
            ngram_rows = ops.ngram_rows(inputs.tokens, batch, self.token_ring, model.ngrams)
        ops.store_tokens(inputs.tokens, batch, self.token_ring)
        streams, pre = self._initial_streams(ops.embed(inputs.tokens, model.embedding))
        selection: Selection | None = None
        for layer, caches in zip(model.layers, self.caches, strict=True):
            streams = layer.remember(streams, ngram_rows, is_image)
            x, mix = ops.hyper_enter(streams, pre, layer.attention_hyper)
            layer.attention.store_global(x, batch, caches)
            if layer.plan.index == model.config.boundary:
                batch = inputs.decoder  # its windows may begin later, even where all tokens go on
            if layer.plan.index == model.config.boundary and inputs.decoder_tokens is not None:
                kept = inputs.decoder_tokens
                if not len(kept):
                    return streams.new_zeros(0, model.config.vocab_size, dtype=torch.float32)
                streams, x = streams[kept], x[kept]
                mix = Mix(mix.pre[kept], mix.post[kept], mix.comb[kept])
                selection = _keep(selection, kept)
                is_image = is_image[kept] if is_image is not None else None
                ngram_rows = ngram_rows[:, kept] if ngram_rows is not None else None
            output, selection = layer.attention.forward(x, batch, caches, selection)
            streams = ops.hyper_leave(streams, output, mix)
            streams, mix = layer.feed_forward(streams, mix.pre, is_image)
            pre = mix.pre
        chosen = inputs.logit_tokens
        if model.config.boundary == len(model.layers) and inputs.decoder_tokens is not None:
            chosen = inputs.decoder_tokens[chosen]  # nothing lies above a boundary, so no token was left behind
        return ops.head(streams[chosen], pre[chosen], model.head)

    def _initial_streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        num_streams = self.model.config.num_streams
        pre = torch.zeros(x.shape[0], num_streams, dtype=torch.float32, device=x.device)
        pre[:, 0] = 1
        return x.unsqueeze(1).repeat(1, num_streams, 1), pre


def _keep(selection: Selection | None, tokens: Tensor) -> Selection | None:
    if selection is None:
        return None
    candidates = selection.candidates[tokens] if selection.candidates is not None else None
    return Selection(selection.entries[tokens], candidates)
