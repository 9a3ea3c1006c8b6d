"""Padded decode steps give each token the bits of the plan's own batch; captured, they never wait for the device."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from deepinfer import LLM, SamplingParams
from deepinfer.backends.cuda.device import runs_hopper_ops
from deepinfer.cache.pools import CachePools
from deepinfer.config.engine import EngineConfig
from deepinfer.messages import SlotSetup, StepPlan
from deepinfer.ops.batch import Computed
from deepinfer.ops.transfer import Staged
from deepinfer.runner.build import build_runner
from deepinfer.runner.graph_cache import RIPE, CudaRecorder, GraphCache
from deepinfer.runner.graph_shapes import StepShape, padded, padded_batch
from deepinfer.runner.lines import Lines
from deepinfer.runner.runner import Runner
from engine.test_same_tokens import mixed_prompts
from recorders import FakeRecorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_card = pytest.mark.skipif(not runs_hopper_ops(DEVICE), reason="no Hopper card with triton")
DRAW = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
GREEDY = replace(DRAW, temperature=0.0)
MIXED = [DRAW, GREEDY, replace(GREEDY, repetition_penalty=1.3)] * 4


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def decode_plan(slots: list[int], starts: list[int], counts: list[int]) -> StepPlan:
    truth, none, zeros = np.ones(len(slots), dtype=np.bool_), int32(), np.zeros(len(slots), dtype=np.int32)
    return StepPlan(
        step=1, slots=int32(*slots), starts=int32(*starts), counts=int32(*counts), decoder_starts=zeros,
        is_prefill=~truth, samples=truth, wants_logits=~truth, host_tokens=none,
        table_slots=none, table_columns=none, table_blocks=none,
    )  # fmt: skip


def prefill_plan(prompts: list[list[int]]) -> StepPlan:
    """Request i in slot i + 1, its blocks 2 * i + 1 and 2 * i + 2."""
    slots = int32(*range(1, len(prompts) + 1))
    plan = decode_plan(slots.tolist(), [0] * len(prompts), [len(prompt) for prompt in prompts])
    return replace(
        plan, is_prefill=plan.samples, host_tokens=int32(*sum(prompts, [])), table_slots=slots.repeat(2),
        table_columns=int32(*[0, 1] * len(prompts)), table_blocks=int32(*range(1, 2 * len(prompts) + 1)),
    )  # fmt: skip


def packed(shape: StepShape, plan: StepPlan) -> torch.Tensor:
    """In memory that holds other numbers."""
    numbers = np.full(shape.size, 77, dtype=np.int32)
    shape.pack(plan, numbers)
    return torch.from_numpy(numbers)


def test_sizes_are_few_and_what_is_too_much_stays_small() -> None:
    sizes = [padded(count) for count in range(1, 2049)]
    assert sorted(set(sizes)) == [
        1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048
    ]  # fmt: skip
    assert all(count <= size < 2 * count for count, size in enumerate(sizes, 1))


def test_a_plan_is_packed_with_a_row_for_the_tokens_that_are_too_many() -> None:
    plan = decode_plan([3, 5], [7, 600], [1, 4])
    shape = StepShape.of(plan, block_tokens=128, max_columns=50, feeds_draft=False)
    assert shape == StepShape(num_tokens=8, num_rows=4, num_columns=16, feeds_draft=False)
    numbers = packed(shape, plan)
    views = [view.tolist() for view in shape.views(numbers)]
    assert views == [
        [7, 600, 601, 602, 603, 0, 1, 2], [0, 1, 1, 1, 1, 2, 2, 2], [0, 1, 5, 8, 8], [7, 600, 0, 0], [3, 5, 0, 0],
        [0] * 4, [[0, 0]] * 4,
    ]  # fmt: skip
    places = [view.storage_offset() for view in shape.views(numbers)]
    assert all(place % 4 == 0 for place in places), "what kernels read begins at multiples of 16 bytes"


def test_a_full_shape_has_no_padding_and_the_table_is_the_most() -> None:
    plan = decode_plan([1, 2], [900, 3], [4, 4])
    shape = StepShape.of(plan, block_tokens=128, max_columns=5, feeds_draft=True)
    assert shape == StepShape(num_tokens=8, num_rows=2, num_columns=5, feeds_draft=True)
    assert shape.views(packed(shape, plan))[2].tolist() == [0, 4, 8]


def test_rows_always_fit_and_lengths_make_few_shapes() -> None:
    draw, found = np.random.default_rng(0), set()
    for _ in range(2000):
        counts = draw.integers(1, 6, draw.integers(1, 300)).tolist()
        starts = draw.integers(0, 131072 - 6, len(counts)).tolist()
        plan = decode_plan(list(range(1, len(counts) + 1)), starts, counts)
        shape = StepShape.of(plan, block_tokens=128, max_columns=1024, feeds_draft=True)
        assert plan.num_rows + (plan.num_tokens < shape.num_tokens) <= shape.num_rows <= shape.num_tokens
        assert max(starts) + max(counts) <= shape.num_columns * 128
        found.add(shape)
    assert len(found) < 60 and {shape.num_columns for shape in found} <= {16, 64, 256, 1024}


def make_runner(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Runner, CachePools]:
    """The golden model after two prompts, and its caches."""
    made: list[CachePools] = []
    monkeypatch.setattr("deepinfer.runner.build.CachePools", lambda *given: made.append(CachePools(*given)) or made[0])
    config = EngineConfig.from_options({"num_blocks": 8, "max_num_requests": 4, "draft_scheduling": False} | options)
    runner = build_runner(config, goldens.CHECKPOINT).runner
    assert isinstance(runner, Runner)
    plan = prefill_plan([goldens.prompt(200).tokens[:130], goldens.prompt(33).tokens])
    runner.compute(plan, Lines.of(plan), feeds_draft=False)
    for slot, start in ((1, 130), (2, 33)):
        for place in range(3):
            token = torch.tensor([40 * slot + place], device=runner.builder.device)
            runner.builder.store(token, int32(slot), int32(start + place))
    return runner, made[0]


PLANS = [
    decode_plan([1, 2], [130, 33], [1, 1]),
    decode_plan([2, 1], [33, 130], [3, 2]),
    decode_plan([2, 0, 1], [33, 4, 130], [1, 1, 3]),
]


def without_graphs(runner: Runner, plan: StepPlan, *, feeds_draft: bool = False) -> Computed:
    graphs, runner.graphs = runner.graphs, None
    computed = runner.compute(plan, Lines.of(plan), feeds_draft=feeds_draft)
    runner.graphs = graphs
    return computed


@pytest.mark.parametrize("plan", PLANS)
def test_padding_changes_neither_logits_nor_caches(monkeypatch: pytest.MonkeyPatch, plan: StepPlan) -> None:
    runner, pools = make_runner(monkeypatch, device="cpu")
    before = pools.blocks.clone(), pools.slots.clone()
    expected = without_graphs(runner, plan).logits
    after = pools.blocks.clone(), pools.slots.clone()
    assert not torch.equal(before[1], after[1])
    pools.blocks.copy_(before[0])
    pools.slots.copy_(before[1])
    shape = StepShape(num_tokens=16, num_rows=8, num_columns=4, feeds_draft=False)
    batch = padded_batch(shape, packed(shape, plan), runner.builder)
    logits = runner.model.compute(batch, shape.num_tokens).logits
    assert logits.shape[0] == 16 and torch.equal(logits[: plan.num_tokens], expected)
    assert torch.equal(pools.blocks, after[0]) and torch.equal(pools.slots, after[1])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Lets engines on the CPU have graphs, which are calls."""
    recorder = FakeRecorder()
    monkeypatch.setattr("deepinfer.runner.build.captures_steps", lambda options, ops: not options.enforce_eager)
    monkeypatch.setattr("deepinfer.runner.build.CudaRecorder", lambda: recorder)
    return recorder


def test_a_step_with_prompt_tokens_or_a_window_that_begins_late_is_never_captured(
    monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder
) -> None:
    runner, _ = make_runner(monkeypatch, device="cpu")
    plain, first = PLANS[0], np.array([True, False])
    others = [
        replace(plain, is_prefill=first, host_tokens=int32(7)), replace(plain, decoder_starts=int32(0, 32)),
        replace(plain, counts=int32(32, 33)),
    ]  # fmt: skip
    assert runner.graphs is not None and runner.graphs.takes(plain)
    assert [runner.graphs.takes(plan) for plan in others] == [False] * len(others)


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_the_same_before_and_after_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder, plan: StepPlan
) -> None:
    runner, pools = make_runner(monkeypatch, device="cpu")
    expected = without_graphs(runner, plan)
    for number in range(1, 2 * RIPE):
        computed = runner.compute(plan, Lines.of(plan), feeds_draft=False)
        assert recorder.num_recorded == (number >= RIPE) and recorder.num_replays == max(0, number - RIPE + 1)
        assert torch.equal(computed.logits, expected.logits)
        assert torch.equal(computed.best[0], expected.logits.argmax(-1)) and computed.best[1].all()
    assert not pools.blocks[0].any() and not pools.slots[0].any()


@pytest.mark.parametrize("num_changes", [1, 4, 5])
def test_new_blocks_come_with_a_step_or_before_it(
    monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder, num_changes: int
) -> None:
    runner, _ = make_runner(monkeypatch, device="cpu")
    table, places = runner.builder.block_table, np.arange(num_changes, dtype=np.int32)
    for step in range(1, RIPE + 3):
        before = table.clone()
        changes = {"table_slots": 1 + places % 2, "table_columns": 2 + places // 2, "table_blocks": 3 + places % step}
        runner.compute(replace(PLANS[1], **changes), Lines.of(PLANS[1]), feeds_draft=False)
        before[1 + places % 2, 2 + places // 2] = torch.from_numpy(3 + places % step)
        assert torch.equal(table, before) and recorder.num_replays == max(0, step - RIPE + 1)
    assert not table[0].any()


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 0}, {"draft_acceptance": "rejection"}], ids=str)
@pytest.mark.parametrize("params", [DRAW, GREEDY, MIXED], ids=["drawn", "greedy", "mixed"])
def test_an_engine_with_captured_steps_gives_the_same_answers(
    recorder: FakeRecorder, options: dict[str, Any], params: Any
) -> None:
    options = {"device": "cpu", "max_num_requests": 8, "draft_scheduling": False} | options
    found = []
    for is_eager in (True, False):
        with LLM(goldens.CHECKPOINT, enforce_eager=is_eager, **options) as llm:
            outputs = llm.generate(mixed_prompts(12), params)
            found.append([[(e.token_id, e.logprob, *e.top) for e in output.logprobs or []] for output in outputs])
        assert (recorder.num_replays > 0) is not is_eager
    assert found[0] == found[1] and all(len(answer) == 12 for answer in found[0])


def test_an_engine_whose_steps_cannot_be_captured_gives_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder
) -> None:
    broken = FakeRecorder(errors=itertools.repeat(torch.AcceleratorError("CUDA error: unspecified launch failure")))
    monkeypatch.setattr("deepinfer.runner.build.CudaRecorder", lambda: broken)
    found = []
    for is_eager in (True, False):
        with LLM(
            goldens.CHECKPOINT, enforce_eager=is_eager, device="cpu", max_num_requests=8, draft_scheduling=False
        ) as llm:
            found.append([output.token_ids for output in llm.generate(mixed_prompts(12), MIXED)])
    assert found[0] == found[1] and broken.num_recorded > 1 and broken.num_replays == 0


def test_drafts_of_a_captured_pass_are_the_same_further_on(recorder: FakeRecorder) -> None:
    """With torch's ops, whose attention is told how far the batch reaches."""
    options = {"device": "cpu", "precision": "float32", "max_num_requests": 1, "draft_scheduling": False}
    found = []
    for is_eager in (True, False):
        with LLM(goldens.CHECKPOINT, enforce_eager=is_eager, **options) as llm:
            outputs = llm.generate([[5, 6, 7], [5, 6, 7, 8] * 10], replace(GREEDY, max_tokens=40))
            found.append([(one.token_ids, one.num_checked_drafts, one.num_accepted_drafts) for one in outputs])
    assert found[0] == found[1] and recorder.num_replays > 0


@on_card
@pytest.mark.parametrize("plan", PLANS)
def test_a_captured_step_is_the_same_step(monkeypatch: pytest.MonkeyPatch, plan: StepPlan) -> None:
    eager, eager_pools = make_runner(monkeypatch, device="cuda", enforce_eager=True)
    graphs, pools = make_runner(monkeypatch, device="cuda", enforce_eager=False)
    assert eager.graphs is None and graphs.graphs is not None and graphs.graphs.takes(plan)
    for _ in range(RIPE + 2):
        for feeds_draft in (True, False):
            expected = eager.compute(plan, Lines.of(plan), feeds_draft=feeds_draft)
            computed = graphs.compute(plan, Lines.of(plan), feeds_draft=feeds_draft)
            assert torch.equal(computed.logits, expected.logits)
            assert torch.equal(computed.best[0], expected.best[0])
    assert torch.equal(pools.blocks, eager_pools.blocks) and torch.equal(pools.slots, eager_pools.slots)
    assert not pools.blocks[0].any() and not pools.slots[0].any()


@on_card
def test_a_captured_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make_runner(monkeypatch, device="cuda", enforce_eager=False)
    for _ in range(RIPE):
        runner.compute(PLANS[0], Lines.of(PLANS[0]), feeds_draft=True)
    with waiting_is_an_error():
        runner.compute(PLANS[0], Lines.of(PLANS[0]), feeds_draft=True)


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """On a card, whatever makes the host wait for the device raises; events that are waited for do not count."""
    if DEVICE.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_card)])
def test_a_step_waits_for_its_tokens_and_drafts_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, temperature: float
) -> None:
    """Drawing, checking and drafting included; each step checks the drafts of the one before."""
    runner, _ = make_runner(monkeypatch, device=device)
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True, seed=1)
    plan = decode_plan([1, 2], [130, 33], [3, 3])
    plan.setups = [
        SlotSetup(slot, params, known, np.ones(known, dtype=np.int32)) for slot, known in ((1, 131), (2, 34))
    ]
    assert runner.speculation is not None
    runner.speculation.progress.starts[[1, 2]] = plan.starts
    num_tokens, num_checked = 0, 0
    for step in range(3 * RIPE):
        with waiting_is_an_error() if step >= 2 * RIPE else contextlib.nullcontext():
            result = runner.execute(plan)
        plan.setups = []
        assert result.num_tokens is not None and result.num_checked is not None and result.is_finite.all()
        assert result.num_checked.tolist() == ([0, 0] if step == 0 else [2, 2])
        num_tokens, num_checked = num_tokens + len(result.token_ids), num_checked + int(result.num_checked.sum())
    starts = runner.speculation.progress.starts[[1, 2]]
    assert starts.sum() == plan.starts.sum() + num_tokens and num_checked == 2 * 2 * (3 * RIPE - 1)


@on_card
def test_numbers_of_the_host_are_those_of_the_replay_and_not_of_the_recording() -> None:
    staged, found = Staged(4, DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    staged.host[:] = 1

    def call() -> None:
        torch.cuda._sleep(50_000_000)  # some 30 ms
        staged.send(4)
        found.copy_(staged.numbers)

    replay = CudaRecorder().record(call)
    staged.host[:] = 2
    assert found.tolist() == [1] * 4
    replay()
    assert found.tolist() == [2] * 4


@on_card
def test_after_a_capture_that_failed_steps_run_and_others_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make_runner(monkeypatch, device="cuda", enforce_eager=False)
    expected = without_graphs(runner, PLANS[0]).logits
    broken = torch.zeros(4, device=DEVICE)
    cache = GraphCache(CudaRecorder(), 1 << 30)

    def waits() -> None:
        torch.empty(1 << 20, device=DEVICE).fill_(1)
        if torch.cuda.is_current_stream_capturing():
            broken.sum().item()

    def adds() -> None:
        broken.add_(1)

    assert [cache.find("waits", lambda: cache.recorder.record(waits)) for _ in range(RIPE)] == [None] * RIPE
    for _ in range(RIPE):
        replay = cache.find("adds", lambda: cache.recorder.record(adds))
    assert replay is not None
    replay()
    assert broken.tolist() == [2] * 4

    def takes() -> None:
        torch.empty(1 << 22, device=DEVICE).fill_(1)

    before = cache.recorder.num_bytes
    cache.recorder.record(takes)
    assert cache.recorder.num_bytes - before >= 1 << 24
    for _ in range(2 * RIPE):
        assert torch.equal(runner.compute(PLANS[0], Lines.of(PLANS[0]), feeds_draft=False).logits, expected)


@on_card
@pytest.mark.parametrize("params", [DRAW, GREEDY, MIXED], ids=["drawn", "greedy", "mixed"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_answers_are_the_same_with_graphs_and_without(drafts: int, params: Any) -> None:
    options = {"device": "cuda", "max_num_requests": 32, "num_draft_tokens": drafts, "draft_scheduling": False}
    found = []
    for is_eager in (False, True):
        with LLM(goldens.CHECKPOINT, enforce_eager=is_eager, **options) as llm:
            for _ in range(2):  # what is captured in one round is replayed in the next
                outputs = llm.generate(mixed_prompts(12), params)
                found.append([[(e.token_id, e.logprob, *e.top) for e in output.logprobs or []] for output in outputs])
    assert all(answers == found[-1] for answers in found) and all(len(answer) == 12 for answer in found[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_card)])
@pytest.mark.parametrize("plan", PLANS)
def test_garbage_in_the_padding_slot_and_block_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, plan: StepPlan, device: str
) -> None:
    runner, pools = make_runner(monkeypatch, device=device)
    expected = without_graphs(runner, plan).logits
    for pool in (pools.blocks, pools.slots):
        pool[0] = 0xFF  # NaN as e4m3, ue8m0 or float32
    runner.builder.token_ring[0] = 7  # no token is refused
    rows = torch.from_numpy(np.flatnonzero(np.repeat(plan.slots, plan.counts))).to(expected.device)
    shape = StepShape(num_tokens=16, num_rows=8, num_columns=4, feeds_draft=True)
    numbers = packed(shape, plan).to(expected.device)
    logits = runner.model.compute(padded_batch(shape, numbers, runner.builder), shape.num_tokens).logits
    assert torch.equal(logits[rows], expected[rows])
    for _ in range(RIPE + 1 if runner.graphs is not None else 0):
        logits = runner.compute(plan, Lines.of(plan), feeds_draft=True).logits
        assert torch.equal(logits[rows], expected[rows])
