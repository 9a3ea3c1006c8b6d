"""The stages between the model's logits and the draw: each one excludes tokens or changes their logits.

A stage looks at the parameters of a step's rows and prepares tensors for the rows that use it, or
nothing; then it gives new logits. A stage that no row uses costs one comparison on the host. To add
one: a field in `params.py`, its column in `slot_params.py` if it is a number, and a class in a
tuple that the sampler runs: `make_changes` (`sampler.py`) or `FILTERS` here.

Changes act on every row and may move the likeliest token. Filters come after them, act on rows
that draw at random and always leave the likeliest token: min-p, then top-k, then top-p, each by
the probabilities at the row's temperature after the stages before it. The draw itself divides by
the temperature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.slot_params import RowParams
from deepinfer.sampling.ties import keep_largest

EXCLUDED = float("-inf")
FIRST_LOOK = 256  # top-p rarely needs more tokens than this, and a few are found much faster than a sort


class Stage:
    """One step between logits and draw. What it must remember of a request it keeps by slot.

    Rows may be any, several of one slot too, at any positions; `params.before` has the tokens between those
    that were observed and a row's position. A stage that does not use a row at a position does not use it later either.
    """

    def set_slot(self, setup: SlotSetup) -> None:
        """The slot has a new occupant, whose known tokens are in the setup."""

    def remembers(self, slots: NDArray[np.int32]) -> bool:
        """Whether tokens of any of these slots matter to `observe`."""
        return False

    def observe(self, slots: NDArray[np.int32], token_ids: Tensor) -> None:
        """The answers in these slots [n], all different, go on with these tokens [n] int64."""

    def prepare(self, params: RowParams, device: torch.device) -> Any | None:
        """What `apply` needs, or None when no row of this step uses the stage."""
        raise NotImplementedError

    def apply(self, logits: Tensor, prepared: Any) -> Tensor:
        """New logits [rows, vocab] float32; rows that do not use the stage stay bit for bit as they are."""
        raise NotImplementedError


def with_rows(logits: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
    """Logits [n, vocab] in which `chosen` [used, vocab] stands for these rows [used] (ascending)."""
    return chosen if len(rows) == len(logits) else logits.index_copy(0, rows, chosen)


class Limits(NamedTuple):
    """The rows that use a stage and what each asked for."""

    rows: Tensor  # [used] int64, ascending
    values: Tensor  # [used]
    temperature: Tensor  # [used] float32, above 0


class MinP(Stage):
    """Exclude tokens with less than `min_p` times the probability of the likeliest one."""

    def prepare(self, params: RowParams, device: torch.device) -> Limits | None:
        return _limits(params, "min_p", params["min_p"] > 0, device)

    def apply(self, logits: Tensor, prepared: Limits) -> Tensor:
        chosen = logits[prepared.rows]
        margin = prepared.temperature * prepared.values.log()  # <= 0
        keep = chosen - chosen.amax(-1, keepdim=True) >= margin[:, None]
        return _exclude(logits, prepared.rows, chosen, keep)


class TopK(Stage):
    """Keep the `top_k` likeliest tokens; of equally likely ones those with the lower ids."""

    def prepare(self, params: RowParams, device: torch.device) -> Limits | None:
        top_k = params["top_k"]
        return _limits(params, "top_k", (top_k > 0) & (top_k < params.vocab_size), device)

    def apply(self, logits: Tensor, prepared: Limits) -> Tensor:
        chosen, count = logits[prepared.rows], prepared.values
        best = chosen.topk(int(count.max()), dim=-1).values
        last = best.gather(1, count[:, None] - 1)[:, 0]
        return _exclude(logits, prepared.rows, chosen, keep_largest(chosen, last, count))


class TopP(Stage):
    """Keep the fewest likeliest tokens whose probabilities sum to `top_p` or more, one at least.

    Where the border falls among equally likely tokens, those with the lower ids are kept.
    """

    def prepare(self, params: RowParams, device: torch.device) -> Limits | None:
        return _limits(params, "top_p", params["top_p"] < 1, device)

    def apply(self, logits: Tensor, prepared: Limits) -> Tensor:
        chosen = logits[prepared.rows]
        best = chosen.amax(-1, keepdim=True)
        unit = unit_of(chosen.shape[1])
        goal = prepared.values * parts_of(chosen, best, prepared.temperature, unit).sum(-1).double()
        ordered = chosen.topk(min(FIRST_LOOK, chosen.shape[1]), dim=-1).values
        last, count, is_reached = _reach(ordered, prepared.temperature, goal, unit)
        flat = (~is_reached).nonzero()[:, 0]  # rows whose tokens have to be sorted to the end
        if len(flat):
            ordered = chosen[flat].sort(dim=-1, descending=True).values
            last[flat], count[flat], _ = _reach(ordered, prepared.temperature[flat], goal[flat], unit)
        return _exclude(logits, prepared.rows, chosen, keep_largest(chosen, last, count))


def unit_of(num_ids: int) -> float:
    """So many parts has 1 that a sum of this many weights, each at most 1, fits 63 bits."""
    return 2.0 ** (62 - num_ids.bit_length())


def parts_of(logits: Tensor, best: Tensor, temperature: Tensor, unit: float) -> Tensor:
    """exp((logit - best) / temperature) in whole parts of 1 / unit: [rows, n] int64.

    Sums of them are exact, so they have the same bits in any order: torch's depends on the number of rows.
    """
    return ((logits - best) / temperature[:, None]).exp().double().mul_(unit).long()


def _reach(ordered: Tensor, temperature: Tensor, goal: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """How many of the best tokens it takes for a sum of weights of `goal` or more.

    ordered: [rows, n] logits, best first. goal: [rows] float64.
    Returns the last token's logit, the number of tokens, and whether these n were enough.
    """
    weights = parts_of(ordered, ordered[:, :1], temperature, unit)
    sums = weights.cumsum(-1)
    count = (sums - weights < goal[:, None]).sum(-1).clamp(min=1)
    return ordered.gather(1, count[:, None] - 1)[:, 0], count, sums[:, -1] >= goal


FILTERS: tuple[Stage, ...] = (MinP(), TopK(), TopP())


def _limits(params: RowParams, name: str, uses: NDArray[np.bool_], device: torch.device) -> Limits | None:
    """The rows that use a filter and draw at random."""
    rows = np.flatnonzero(uses & params.is_random)
    if rows.size == 0:
        return None
    arrays = rows, params[name][rows], params["temperature"][rows]
    return Limits(*(to_device(array, device) for array in arrays))


def _exclude(logits: Tensor, rows: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
    return with_rows(logits, rows, chosen.masked_fill(~keep, EXCLUDED))
