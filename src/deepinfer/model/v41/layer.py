"""One backbone layer: optional engram, then an attention half and an expert half on m streams."""

from __future__ import annotations

from torch import Tensor

from deepinfer.model.v41.attention import Attention
from deepinfer.model.v41.config import LayerPlan
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.table import Mix, Ops


class Layer:
    """Prepared weights of one layer and the order in which its ops run."""

    def __init__(self, plan: LayerPlan, ops: Ops, weights: ModelWeights):
        index = plan.index
        self.plan, self.ops = plan, ops
        self.engram = ops.prepare_engram(weights.engram(index)) if plan.engram is not None else None
        self.attention_hyper = ops.prepare_hyper(weights.hyper(index, "attn"), weights.attention_norm(index))
        self.attention = Attention(plan, ops, weights)
        self.ffn_hyper = ops.prepare_hyper(weights.hyper(index, "ffn"), weights.ffn_norm(index))
        self.router = ops.prepare_router(weights.router(index))
        self.experts = ops.prepare_experts(weights.experts(index))
        self.shared_expert = ops.prepare_shared_expert(weights.shared_expert(index))

    def remember(self, streams: Tensor, rows: Tensor | None, is_image: Tensor | None) -> Tensor:
        """Engram update of the streams [T, m, H]; rows [engram layers, T, columns]."""
        if self.engram is None:
            return streams
        assert rows is not None and self.plan.engram is not None
        return self.ops.engram(streams, rows[self.plan.engram], is_image, self.engram)

    def feed_forward(self, streams: Tensor, pre: Tensor, is_image: Tensor | None) -> tuple[Tensor, Mix]:
        """The expert half: new streams, and the mix whose `pre` the next half uses."""
        x, mix = self.ops.hyper_enter(streams, pre, self.ffn_hyper)
        chosen, share = self.ops.route(x, is_image, self.router)
        routed = self.ops.experts(x, chosen, share, self.experts)
        return self.ops.hyper_leave(streams, self.ops.shared_expert(x, routed, self.shared_expert), mix), mix
