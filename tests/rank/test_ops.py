"""A rank's ops: experts and table rows of others stand for the local ones, also behind a clock."""

from __future__ import annotations

import torch

from deepinfer.ops.clock import OpClock
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build
from deepinfer.ops.weights import EngramWeights, RouterWeights, Weight
from deepinfer.rank.ops import keep_share


def table() -> Ops:
    """Ops that choose four of 384 experts and tell which rows they are asked for, over a share of 100 rows."""
    told = {
        "prepare_router": lambda router: "router",
        "route": lambda x, is_image, router: (torch.tensor([[0, 5], [6, 383]]), router),
        "prepare_engram": lambda engram: "local rows",
        "engram": lambda streams, rows, is_image, engram: (engram, rows.tolist()),
    }
    return build({"reference": reference_ops("fast"), "told": told})


def test_what_is_not_here_is_taken_modulo_what_is() -> None:
    nothing, weight = torch.zeros(0), Weight(torch.zeros(1))
    for clock in (None, OpClock(torch.device("cpu"))):
        ops = table()
        keep_share(ops, 64)
        timed = ops if clock is None else clock.around(ops)
        bias = Weight(torch.zeros(384))
        router = timed.prepare_router(RouterWeights(weight, bias, bias, 2, "softmax", True, 1.0, 1.0))
        chosen, share = timed.route(nothing, None, router)
        assert (chosen.tolist(), share) == ([[0, 5], [0, 5]], "router")
        engram = timed.prepare_engram(EngramWeights(Weight(torch.zeros(100, 1)), weight, weight, weight, 0.0))
        assert timed.engram(nothing, torch.tensor([3, 99, 100, 250]), None, engram) == ("local rows", [3, 99, 0, 50])
        if clock is not None:
            assert set(clock.take_ops()) == {"route", "engram"}
