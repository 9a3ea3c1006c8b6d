"""Speculative sampling by rejection: keeps a draft by the ratio of the two probabilities.

A draft x drawn from q is kept with probability min(1, p(x) / q(x)), else the token is drawn from what p
has more than q; either way it is distributed as p. Sources: Leviathan, Kalman, Matias, "Fast inference
from transformers via speculative decoding", ICML 2023; Chen et al., "Accelerating large language model
decoding with speculative sampling", 2023 (arXiv:2302.01318).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.reference.sample import gumbel_noise, lowest_argmax, uniform
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_params import RowParams

# Positions are below 2^31, so these give noise of its own to each purpose.
DRAFT_NOISE, KEEP_NOISE, RESIDUAL_NOISE = (stream << 32 for stream in (1, 2, 3))


class Proposed(NamedTuple):
    """Drafts that some lines check: line numbers [n] ascending, tokens [n] int64, logits that gave them [n, vocab]."""

    lines: NDArray[np.int64]
    token_ids: Tensor
    logits: Tensor


def keep_or_redraw(token_ids: Tensor, logits: Tensor, params: RowParams, proposed: Proposed) -> Tensor:
    """Tokens [rows] int64 in which rows that check a draft and draw at random have kept or replaced it.

    token_ids: [rows], drawn without regard to drafts. logits: [rows, vocab], after all stages.
    """
    chosen = np.flatnonzero(params.is_random[proposed.lines])
    if chosen.size == 0:
        return token_ids
    device, rows = logits.device, proposed.lines[chosen]
    lines, places = to_device(rows, device), to_device(chosen, device)
    temperature = to_device(params["temperature"][rows], device).double()[:, None]
    seeds = to_device(params["seed"][rows], device)
    positions = to_device(params.positions[rows].astype(np.int64), device)
    target = (logits[lines].double() / temperature).softmax(-1)
    draft = (proposed.logits[places].double() / temperature).softmax(-1)
    drafted = proposed.token_ids[places][:, None]
    chance = uniform(seeds, positions + KEEP_NOISE, 1)
    is_kept = chance * draft.gather(1, drafted) < target.gather(1, drafted)
    noise = gumbel_noise(seeds, positions + RESIDUAL_NOISE, logits.shape[1])
    redrawn = lowest_argmax((target - draft).clamp_min(0.0).log() + noise)
    return token_ids.index_copy(0, lines, torch.where(is_kept[:, 0], drafted[:, 0], redrawn))
