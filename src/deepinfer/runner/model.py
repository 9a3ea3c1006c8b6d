"""What the device side asks of a model, of whatever version."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepinfer.ops.batch import ForwardBatch, Hidden


class Model(Protocol):
    """A model bound to its caches."""

    def forward(self, inputs: ForwardBatch) -> Hidden:
        """What `logits` reads, for the logit tokens in their order; writes the step's cache entries."""
        ...

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits [tokens, vocab] float32."""
        ...
