"""Excluding the tokens that a grammar forbids. It comes before every other stage, and for greedy rows too."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.stages import EXCLUDED
from deepinfer.structured.rows import RowMasks


def exclude_masked(logits: Tensor, masks: RowMasks) -> Tensor:
    """New logits [rows, vocab] float32: -inf where a row's mask has no bit.

    Rows without a mask stay bit for bit as they are, and so do allowed tokens. Masks travel to the
    device packed, 1 bit per token.
    """
    rows = torch.from_numpy(masks.rows).to(logits.device)
    packed = torch.from_numpy(masks.bits).to(logits.device).view(torch.uint8)  # [n, 4 * words], little-endian
    bit = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    is_excluded = (packed[:, :, None] & bit == 0).view(len(rows), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        return logits.masked_fill(is_excluded, EXCLUDED)
    return logits.index_copy(0, rows, logits[rows].masked_fill(is_excluded, EXCLUDED))
