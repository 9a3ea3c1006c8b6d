"""The steps by which an engine measures what it needs beside its caches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import goldens
from deepinfer import LLM
from deepinfer.errors import ConfigError
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import build
from deepinfer.runner.drafts import Drafts
from deepinfer.runner.peak import bytes_beside_blocks, largest_steps, run_steps

OPS = build({"reference": reference_ops("fast")})
MIB = 1 << 20
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_they_are_full_and_end_the_longest_requests() -> None:
    prompts, draws = largest_steps(num_slots=256, num_drafts=3, step_tokens=2050, max_model_len=1 << 20)
    assert prompts.counts.tolist() == [9, 9] + [8] * 254 and draws.counts.tolist() == [4] * 256
    for plan in (prompts, draws):
        assert (plan.starts + plan.counts == 1 << 20).all() and plan.samples.all() and not plan.slots.any()
    assert prompts.is_prefill.all() and len(prompts.host_tokens) == 2050 and not draws.is_prefill.any()


def test_they_hold_no_more_tokens_than_steps_and_requests_do() -> None:
    prompts, draws = largest_steps(num_slots=8, num_drafts=5, step_tokens=5, max_model_len=100)
    assert prompts.counts.tolist() == draws.counts.tolist() == [1] * 5
    prompts, draws = largest_steps(num_slots=2, num_drafts=5, step_tokens=2048, max_model_len=100)
    assert prompts.counts.tolist() == [100] * 2 and draws.counts.tolist() == [6] * 2
    for plan in largest_steps(num_slots=2, num_drafts=5, step_tokens=2048, max_model_len=3):
        assert plan.counts.tolist() == [3] * 2 and not plan.starts.any()


@pytest.mark.parametrize("drafts", [0, 3])
def test_running_them_changes_no_cache(drafts: int) -> None:
    with LLM(goldens.CHECKPOINT, device="cpu", num_blocks=1, max_num_requests=3, num_draft_tokens=drafts) as llm:
        runner = llm._client.core.executor
        pools = runner.model.pools
        head = Drafts(runner.model.draft, runner.builder, drafts) if drafts else None
        before = pools.blocks.clone(), pools.slots.clone()
        with mock.patch.object(runner.sampler, "sample", wraps=runner.sampler.sample) as sample:
            run_steps(runner, head, largest_steps(3, drafts, 64, 500))
        assert [len(call.args[0]) for call in sample.call_args_list] == [3, 3 * (1 + drafts)]
        assert torch.equal(pools.blocks, before[0]) and torch.equal(pools.slots, before[1])


class Hungry:
    """In place of a runner: each step takes 64 MiB for a while, and 16 MiB stay."""

    def __init__(self, most: int = 64 * MIB) -> None:
        self.sampler, self._most = mock.Mock(), most
        self.kept = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")

    def compute(self, plan: object, lines: object, *, feeds_draft: bool) -> mock.Mock:
        torch.zeros(self._most, dtype=torch.uint8, device="cuda")
        return mock.Mock()


@on_device
def test_what_is_measured_holds_what_stays_and_the_largest_step() -> None:
    taken = bytes_beside_blocks(lambda: (Hungry(), None), OPS, largest_steps(1, 0, 8, 8), torch.device("cuda"))
    assert 80 * MIB <= taken < 160 * MIB  # and pieces of torch's


@on_device
def test_a_step_that_does_not_fit_the_card_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a step of 8 tokens \(max_step_tokens\) for 1 requests does not fit cuda"):
        bytes_beside_blocks(lambda: (Hungry(1 << 42), None), OPS, largest_steps(1, 0, 8, 8), torch.device("cuda"))


def test_clocks_and_checkers_do_not_look_on() -> None:
    watched = build({"reference": reference_ops("fast")})
    watched.clock, watched.checker = mock.Mock(is_on=True), mock.Mock(is_on=True)
    seen = []
    with mock.patch.multiple("torch.cuda", empty_cache=mock.DEFAULT, memory_allocated=lambda device: 5,
                             memory_reserved=lambda device: 12, synchronize=mock.DEFAULT):  # fmt: skip
        runner = mock.Mock()
        runner.compute = lambda *given, **more: seen.append((watched.clock.is_on, watched.checker.is_on)) or mock.Mock()
        taken = bytes_beside_blocks(lambda: (runner, None), watched, largest_steps(1, 0, 8, 8), torch.device("cpu"))
    assert taken == 7 and seen == [(False, False)] * 2
    assert watched.clock.is_on and watched.checker.is_on


def test_they_look_on_again_after_a_failure() -> None:
    watched = build({"reference": reference_ops("fast")})
    watched.clock = mock.Mock(is_on=True)
    fails, cuda = mock.Mock(side_effect=ValueError), dict.fromkeys(("empty_cache", "memory_allocated"), mock.DEFAULT)
    with mock.patch.multiple("torch.cuda", **cuda), pytest.raises(ValueError):
        bytes_beside_blocks(fails, watched, [], torch.device("cpu"))
    assert watched.clock.is_on
