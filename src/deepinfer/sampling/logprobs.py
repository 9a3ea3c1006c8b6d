"""Log-probabilities of tokens: log-softmax in float32 of the model's logits, or of what is drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.ties import largest_ids


class TokenLogprobs(NamedTuple):
    """The device form of `messages.Logprobs`: same fields, same meaning; zeros in rows that did not ask."""

    values: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int32, 1 = the likeliest; equally likely ones by lower id
    top_ids: Tensor  # [rows, K] int32, best first
    top_values: Tensor  # [rows, K] float32


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """One line per row. logits: [rows, vocab] float32. token_ids: [rows] int64. K = num_top, at most the vocabulary."""
    value, values = logits.gather(1, token_ids[:, None]), logits.log_softmax(-1)  # unlike logsumexp, row by row
    top_ids = largest_ids(logits, min(num_top, logits.shape[1]))
    return TokenLogprobs(
        values.gather(1, token_ids[:, None])[:, 0],
        _ranks(logits, value, token_ids),
        top_ids.int(),
        values.gather(1, top_ids),
    )


def drawn_logprobs(
    logits: Tensor, processed: Tensor, token_ids: Tensor, is_finite: Tensor, params: RowParams
) -> TokenLogprobs | None:
    """Of the chosen tokens; by `logprobs_mode` a row's are those of the model or of what it was drawn from.

    logits, processed: [rows, vocab] float32, before and after all stages; the temperature is
    applied to the latter here. token_ids: [rows] int64. is_finite: [rows] bool; lines of other rows
    mean nothing.
    K is the largest number of alternatives that any row wants, at most the vocabulary.
    Returns None when no row asks.
    """
    wanted = params["logprobs"]
    asking = np.flatnonzero(wanted >= 0)
    if asking.size == 0:
        return None
    rows = to_device(asking, logits.device)
    chosen = logits[rows]
    if (wants_processed := params["wants_processed"][asking]).any():
        divisor = np.where(params.is_random, params["temperature"], np.float32(1.0))[asking]
        scaled = processed[rows] / to_device(divisor, logits.device)[:, None]
        chosen = torch.where(to_device(wants_processed, logits.device)[:, None], scaled, chosen)
    chosen = chosen.where(is_finite[rows, None], 0.0)
    lines = token_logprobs(chosen, token_ids[rows], int(wanted.max()))
    return TokenLogprobs(*(_spread(line, rows, logits.shape[0]) for line in lines))


def _ranks(logits: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    lower = torch.arange(logits.shape[1], device=logits.device) < ids[:, None]
    return (1 + ((logits > value) | ((logits == value) & lower)).sum(-1)).int()


def _spread(lines: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return lines.new_zeros((num_rows, *lines.shape[1:])).index_copy(0, rows, lines)
