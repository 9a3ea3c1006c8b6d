"""The checked table of ops: it changes no result, and tells which op depends on the rest of its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import goldens
from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.ops.check import CHECKED, OF_TOKENS, WRITTEN, OpChecker
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build
from deepinfer.ops.values import Attended, Mix
from ops import world

PROMPTS = [goldens.prompt(200).tokens[:length] for length in (150, 1, 33, 7)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
GREEDY = replace(PARAMS, temperature=0.0)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "max_num_requests": 4, "max_chunk_tokens": 40}


def checked(**replaced: Callable[..., Any]) -> Ops:
    return OpChecker(torch.device("cpu")).around(build({"reference": reference_ops("fast"), "mine": replaced}))


def found(ops: Ops, name: str) -> str | None:
    assert ops.checker is not None
    return ops.checker.checks()[name].first_difference


def test_every_op_of_a_step_is_told_its_tokens() -> None:
    for name in CHECKED:
        arguments = set(getattr(Ops, name).__annotations__)
        assert arguments & (OF_TOKENS | {"batch"}), name
        assert set(WRITTEN.get(name, ())) <= arguments


def test_native_ops_give_rows_alone_what_they_give_them_in_a_batch_and_the_engine_answers_the_same() -> None:
    answers = []
    for check_ops in (False, True):
        with LLM(goldens.CHECKPOINT, batch_invariant=True, check_ops=check_ops, **OPTIONS) as llm:
            outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, GREEDY)]
            answers.append([output.token_ids for output in outputs])
            checks = llm.stats().op_checks
        assert bool(checks) is check_ops
    assert answers[0] == answers[1]
    assert set(checks) == set(CHECKED)
    assert {name: check.first_difference for name, check in checks.items() if check.num_different} == {}
    assert all(check.num_calls > 0 for check in checks.values())
    assert checks["attend"].backend == "cpu" and checks["draw"].backend == "reference on cpu"


def test_an_op_that_counts_its_tokens_is_found_with_both_numbers() -> None:
    def embed(tokens: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        return embedding[tokens] + (len(tokens) == 3), torch.ones(len(tokens), 1)

    def prepare_embedding(weight: Any, num_streams: int) -> Any:
        return weight

    ops = checked(embed=embed, prepare_embedding=prepare_embedding)
    table = torch.arange(8.0)[:, None]
    for count in (1, 2, 3, 4):
        ops.embed(torch.arange(count), table)
    assert ops.checker is not None
    check = ops.checker.checks()["embed"]
    assert (check.backend, check.num_calls, check.num_different) == ("mine on cpu", 3, 1)  # one token has no parts
    assert check.first_difference == "tokens 0 to 0 of 3 tokens, value 0 at [0, 0]: 1.0, alone 0.0"


def test_values_within_a_mix_are_cut_and_compared() -> None:
    ops = checked(hyper_leave=lambda streams, output, mix: streams * mix.post[:, :, None])
    mix = Mix(torch.ones(4, 2), torch.arange(8.0).view(4, 2), torch.ones(4, 2, 2))
    ops.hyper_leave(torch.ones(4, 2, 3), torch.ones(4, 3), mix)
    assert found(ops, "hyper_leave") is None


def test_attended_heads_in_a_form_of_the_backend_are_compared_and_cut_as_a_tensor() -> None:
    @dataclass(frozen=True)
    class Doubled(Attended):
        twice: Tensor

        def heads(self) -> Tensor:
            return self.twice / 2

    def attend(q: Tensor, window_rows: Any, batch: Any, ring: Any, pages: Any, entries: Any, attention: Any) -> Doubled:
        return Doubled(q * 2 + (len(q) == 3))

    def project_out(attended: Tensor | Attended, attention: Any) -> Tensor:
        x = attended.twice if isinstance(attended, Doubled) else attended * 2
        return x.flatten(1)

    given = reference_ops("fast")
    same = {name: given[name] for name in ("prepare_attention", "attention_inputs", "main_rows")}
    ops, batch = checked(attend=attend, project_out=project_out, **same), world.make_batch([(1, 0, 1), (2, 0, 2)])
    q, rows = torch.ones(3, 2, 4), torch.zeros(3, 1)
    ops.project_out(ops.attend(q, rows, batch, None, None, None, None), None)
    assert found(ops, "attend") == "row 0 of 3 tokens, value 0 at [0, 0, 0]: 1.5, alone 1.0"
    assert found(ops, "project_out") is None


def test_what_an_op_writes_is_compared_and_written_once() -> None:
    def write_tokens(token_ids: Tensor, ring: Tensor, slots: Any, positions: Any) -> None:
        ring[slots, positions] += token_ids.int() * len(slots)

    ops = checked(write_tokens=write_tokens)
    ring = torch.zeros(4, 8, dtype=torch.int32)
    ops.write_tokens(torch.tensor([5, 6, 7]), ring, np.array([1, 2, 3]), np.array([0, 4, 2]))
    assert (ring[1, 0], ring[2, 4], ring[3, 2], ring.count_nonzero()) == (15, 18, 21, 3)
    assert found(ops, "write_tokens") == "value 0 at [1, 0]: 15, alone 5"


@pytest.mark.parametrize(("value", "is_equal"), [(torch.nan, True), (-0.0, False)])
def test_bits_are_compared_not_numbers(value: float, is_equal: bool) -> None:
    def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return torch.full((len(logits),), value if len(logits) == 3 or is_equal else 0.0)

    ops = checked(draw=draw)
    ops.draw(torch.zeros(3, 2), *(torch.zeros(3) for _ in range(3)))
    assert (found(ops, "draw") is None) is is_equal


def test_clock_and_check_are_not_both_there() -> None:
    with pytest.raises(ConfigError, match="time_ops and check_ops are both true"):
        LLM(goldens.CHECKPOINT, time_ops=True, check_ops=True)
