"""Numerics: which roundings of the released reference are reproduced, and how sums are formed.

`exact` and `float32` compute what the test oracle computes, expression by expression: products with
weights in float64, everything else in float32, nothing contracted or reordered. So a whole prompt
gives the oracle's bits, and a last-bit difference never decides a rounding to fp8, fp4 or bf16.
`fast` keeps the rounding that a checkpoint is trained with and that matrix units take for granted
(fp8 inputs of fp8 and fp4 products), drops the others, and may fuse and reorder.

Every op of this folder takes a `Numerics` first; `build.reference_ops` binds it. Tensors between
ops are float32 in all modes; the roundings are explicit steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class Numerics:
    """Rounding points of one precision mode. Cached vectors are quantised in every mode.

    activations: intermediate results are rounded to bf16, and the softmax of the attention is
        folded in blocks of 64 slots with bf16 shares, as the released kernel does.
    gemm_inputs: the input of a product with fp8 or fp4 weights is rounded to fp8 in blocks of 32.
    index_scores: index scores are formed in bf16.
    accumulate: dtype of products with weights. In float64 the order of a sum leaves no trace after
        rounding to float32, so a result does not depend on what else is in the batch.
    fuses: expressions may be contracted and reordered.
    """

    activations: bool
    gemm_inputs: bool
    index_scores: bool
    accumulate: torch.dtype
    fuses: bool

    @classmethod
    def of(cls, precision: str) -> Numerics:
        """The mode "exact", "float32" or "fast". Raises ConfigError for another name."""
        if precision == "exact":
            return cls(activations=True, gemm_inputs=True, index_scores=True, accumulate=torch.float64, fuses=False)
        if precision == "float32":
            return cls(activations=False, gemm_inputs=False, index_scores=False, accumulate=torch.float64, fuses=False)
        if precision == "fast":
            return cls(activations=False, gemm_inputs=True, index_scores=False, accumulate=torch.float32, fuses=True)
        raise ConfigError(f"precision is {precision!r}; it must be exact, float32 or fast")

    def act(self, x: Tensor) -> Tensor:
        """An intermediate result as float32, rounded to bf16 where the mode says so."""
        if self.activations:
            return x.to(torch.bfloat16).float()
        return x if x.dtype is torch.float32 else x.float()

    def wide(self, x: Tensor) -> Tensor:
        """x in the accumulation dtype."""
        return x if x.dtype is self.accumulate else x.to(self.accumulate)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., columns] @ weight.T, weight [rows, columns] in `accumulate`: float32 [..., rows]."""
        product = F.linear(self.wide(x), weight)
        return product if product.dtype is torch.float32 else product.float()
