"""What the device side asks of a model, of whatever version."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepinfer.ops.batch import Computed, ForwardBatch, Hidden


class Model(Protocol):
    """A model bound to its caches."""

    def compute(self, inputs: ForwardBatch, num_lines: int) -> Computed:
        """Logits of the first `num_lines` logit tokens, what `logits` reads of all; writes the step's cache entries."""
        ...

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits [tokens, vocab] float32."""
        ...
