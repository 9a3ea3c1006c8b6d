"""Log-probabilities of the model itself, for the rows that ask for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.ties import largest_ids


class TokenLogprobs(NamedTuple):
    """The device form of `messages.Logprobs`: same fields, same meaning; zeros in rows that did not ask."""

    values: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int32, 1 = the likeliest; equally likely ones by lower id
    top_ids: Tensor  # [rows, K] int32, best first
    top_values: Tensor  # [rows, K] float32


def model_logprobs(logits: Tensor, token_ids: Tensor, is_finite: Tensor, params: RowParams) -> TokenLogprobs | None:
    """Log-softmax in float32 of the model's logits, before temperature and every stage.

    logits: [rows, vocab] float32. token_ids: [rows] int64, the chosen tokens. is_finite: [rows]
    bool; lines of other rows mean nothing.
    K is the largest number of alternatives that any row wants, at most the vocabulary.
    Returns None when no row asks.
    """
    wanted = params["logprobs"]
    asking = np.flatnonzero(wanted >= 0)
    if asking.size == 0:
        return None
    rows = torch.from_numpy(asking).to(logits.device)
    chosen, ids = logits[rows].where(is_finite[rows, None], 0.0), token_ids[rows]
    value = chosen.gather(1, ids[:, None])
    total = chosen.logsumexp(-1, keepdim=True)
    top_ids = largest_ids(chosen, min(int(wanted.max()), chosen.shape[1]))
    lines = (
        (value - total)[:, 0],
        _ranks(chosen, value, ids),
        top_ids.int(),
        chosen.gather(1, top_ids) - total,
    )
    return TokenLogprobs(*(_spread(line, rows, logits.shape[0]) for line in lines))


def _ranks(logits: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    lower = torch.arange(logits.shape[1], device=logits.device) < ids[:, None]
    return (1 + ((logits > value) | ((logits == value) & lower)).sum(-1)).int()


def _spread(lines: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return lines.new_zeros((num_rows, *lines.shape[1:])).index_copy(0, rows, lines)
