"""The DSpark draft head: a few blocks over main vectors that propose the next tokens in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.pools import CachePools
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.layer import layer_caches, prepare_layer
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState
from deepinfer.ops.table import Ops, Prepared
from deepinfer.ops.values import DrawKeys


class Draft:
    """Prepared weights of the draft head; it shares embedding and output matrix with the backbone."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: ModelWeights, embedding: Prepared, head: Prepared):
        assert config.draft is not None
        self.ops, self.embedding = ops, embedding
        self.plans = config.draft_layers
        self.blocks = [prepare_layer(plan, ops, weights) for plan in self.plans]
        self.head = ops.prepare_draft(weights.draft(), head)
        self.num_taps, self.noise_id = len(config.draft.target_layers), config.draft.noise_id


class BoundDraft:
    """The draft head over one set of caches: a ring of main vectors for each block."""

    def __init__(self, draft: Draft, pools: CachePools):
        self._draft, self._ops = draft, draft.ops
        self._bound = [
            BoundLayer(parts, layer_caches(plan, pools)) for plan, parts in zip(draft.plans, draft.blocks, strict=True)
        ]
        self._layers = draft.ops.prepare_layers(self._bound)

    def new_taps(self, num_tokens: int, hidden_size: int, device: torch.device) -> Tensor:
        """Memory for the inputs of the target layers: [tokens, taps, hidden] float32."""
        return torch.empty(num_tokens, self._draft.num_taps, hidden_size, device=device)

    def store_main(self, taps: Tensor, batch: TokenBatch) -> None:
        """Write the main vectors of these tokens into the rings; taps [T, taps, H]."""
        main = self._ops.draft_main(taps, self._draft.head)
        for block in self._bound:
            rows = self._ops.main_rows(main, batch.positions, block.parts.attention)
            self._ops.store_window(rows, batch, block.caches.window)

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """One pass over blocks of places: newest tokens [n] int64 -> x [n * places, H], logits [n * places, V].

        batch: one row of places for each token, `is_block`; the first holds the token, the others noise.
        Line i of a row is for the token after place i, without what the token there adds (`next`).
        """
        num_rows = len(tokens)
        inputs = tokens.new_full((num_rows, batch.num_tokens // num_rows), self._draft.noise_id)
        inputs[:, 0] = tokens
        state = LayerState(*self._ops.embed(inputs.flatten(), self._draft.embedding), None)
        state = self._ops.run_layers(state, LayerInputs(batch, None, None), self._layers)
        x, logits = self._ops.draft_head(state.streams, state.pre, self._draft.head)
        return x, logits

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and raw confidence [n] of the tokens that follow `previous` [n] int64."""
        return self._ops.draft_next(logits, x, previous, self._draft.head)

    def draft(self, tokens: Tensor, batch: TokenBatch, keys: DrawKeys | None) -> tuple[Tensor, Tensor]:
        """The drafts [n, places] int64 of such a pass, drawn from the logits as they are, and for each place the raw
        confidence and the log-probability of the likeliest token [n, 2, places] float32.

        keys: of the draws at the first place; None = the likeliest tokens.
        """
        ops = self._ops
        x, logits = (value.unflatten(0, (len(tokens), -1)) for value in self.block(tokens, batch))
        drafts, confidences, best = [], [], []
        for place in range(logits.shape[1]):
            given = logits[:, place], x[:, place], tokens
            if keys is None:
                tokens, logprobs, confidence = ops.draft_likeliest(*given, self._draft.head)
            else:
                row, confidence = self.next(*given)
                tokens = ops.draw(row, keys.temperature, keys.seeds, keys.positions + place)
                logprobs = ops.best_logprobs(row)
            drafts.append(tokens)
            confidences.append(confidence)
            best.append(logprobs)
        return torch.stack(drafts, dim=1), torch.stack([*confidences, *best], dim=1).unflatten(1, (2, -1))
