"""Excluding the tokens that a grammar forbids. It comes before every other stage, and for greedy rows too."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.transfer import to_device
from deepinfer.sampling.stages import EXCLUDED
from deepinfer.structured.rows import RowMasks


def exclude_masked(logits: Tensor, masks: RowMasks) -> Tensor:
    """New logits [rows, vocab] float32: -inf where a row's mask has no bit.

    Rows without a mask stay bit for bit as they are, and so do allowed tokens. Masks travel to the
    device packed, 1 bit per token.
    """
    rows = to_device(masks.rows, logits.device)
    packed = to_device(masks.bits, logits.device).view(torch.uint8)  # [n, 4 * words], little-endian
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_excluded = (packed[:, :, None] & bit == 0).view(len(rows), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        return logits.masked_fill(is_excluded, EXCLUDED)
    return logits.index_copy(0, rows, logits[rows].masked_fill(is_excluded, EXCLUDED))
