"""What the device side asks of a model, of whatever version."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from deepinfer.ops.batch import ForwardBatch, Hidden


class Model(Protocol):
    """A model bound to its caches."""

    def forward(self, inputs: ForwardBatch) -> Hidden:
        """What `logits` reads, for the logit tokens in their order; writes the step's cache entries."""
        ...

    def logits(self, hidden: Hidden, out: Tensor | None = None) -> Tensor:
        """Logits [tokens, vocab] float32, in `out` if it is given."""
        ...


class Computed(NamedTuple):
    """What a step has on the device before its tokens are drawn.

    hidden: first of the step's lines, then of the prompt tokens that are scored; None when there are none of these.
    logits: [lines, vocab] float32. best: what `best_tokens` gives for them, if the step has asked already.
    """

    hidden: Hidden | None
    logits: Tensor
    best: tuple[Tensor, Tensor] | None = None
