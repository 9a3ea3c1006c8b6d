"""Drafts change no text: whatever their number, schedule, batch, chunks or interruptions (nano, native ops)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.backends.cpu.library import is_available
from deepinfer.errors import ConfigError
from deepinfer.runner.speculation import Speculation
from deepinfer.speculate.policy import CheckAll
from drafting import with_oracle
from recorders import FakeRecorder

pytestmark = pytest.mark.skipif(not is_available(), reason="texts are compared bit for bit, which needs a C++ compiler")

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WORDS = SamplingParams(seed=3, max_tokens=NUM_TOKENS, structured_outputs={"regex": "[a-z]{3,12}( [a-z]{2,9}){2,5}"})
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True, seed=11)


def prompts(llm: LLM) -> list[list[int]]:
    """Every 70th evaluation prompt without a picture: 24 of all kinds."""
    records = [json.loads(line) for line in EVAL.read_text().splitlines()]
    chosen = [llm.tokenizer.encode(record["prompt"]) for record in records[::70] if "image" not in record["skill"]]
    return [tokens for tokens in chosen if len(tokens) < 600]


def texts(llm: LLM, params: SamplingParams, batch: int = 64) -> list[list[int]]:
    tokens, found = prompts(llm), []
    for first in range(0, len(tokens), batch):
        found += [output.token_ids for output in llm.generate(tokens[first : first + batch], params, progress=False)]
    return found


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(num_draft_tokens=0, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[SamplingParams, list[list[int]]]:
    return {params: texts(plain, params) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (64, {"num_draft_tokens": 1, "draft_scheduling": False}),
        (64, {"num_draft_tokens": 3, "draft_scheduling": False, "async_scheduling": False}),
        (64, {"draft_scheduling": False}),
        (64, {}),
        (7, {"draft_scheduling": False, "max_chunk_tokens": 17}),
        (1, {"num_draft_tokens": 3}),
        (64, {"num_draft_tokens": 2, "decoder_replay": "full", "max_step_tokens": 64}),
    ],
)
def test_texts_are_those_without_drafts(
    expected: dict[SamplingParams, list[list[int]]], batch: int, options: dict[str, Any]
) -> None:
    with LLM(batch_invariant=True, **options) as llm:
        for params, wanted in expected.items():
            assert texts(llm, params, batch) == wanted
        stats = llm.stats()
    assert stats.drafts is not None and stats.drafts.proposed.sum() > 0
    if options.get("draft_scheduling") is False:
        assert stats.drafts.mean_accepted > 0.3
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_with_drafts_in_flight_changes_nothing(plain: LLM, params: SamplingParams, is_async: bool) -> None:
    tokens = [token for prompt in prompts(plain) for token in prompt]
    chosen = [tokens[50 * start :][: 113 + start] for start in range(7)]  # each answer grows into a second block
    options = {"num_blocks": 3, "max_step_tokens": 64, "max_num_requests": 16, "async_scheduling": is_async}
    with LLM(batch_invariant=True, draft_scheduling=False, **options) as llm:
        ours = [output.token_ids for output in llm.generate(chosen, params, progress=False)]
        assert llm.stats().num_preemptions > 0 and llm.stats().num_free_blocks == 3
        assert llm.stats().drafts.checked.sum() > 0
    assert ours == [output.token_ids for output in plain.generate(chosen, params, progress=False)]


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"bad_words": ("the", " a", "1"), "min_tokens": 5, "ignore_eos": False},
        {"top_k": 3, "min_p": 0.05, "temperature": 2.0},
        {"logit_bias": {5: 4.0, 300: -100.0}, "logprobs": 3, "ignore_eos": False},
        {"allowed_token_ids": tuple(range(3, 2000))},
        {"structured_outputs": {"regex": "[a-z]{3,12}( [a-z]{2,9}){2,5}"}, "ignore_eos": False},
        {"structured_outputs": {"json_object": True}, "ignore_eos": False},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_parameter_acts_at_checked_positions_as_without_drafts(
    plain: LLM, drafting: LLM, fields: dict[str, Any], temperature: float
) -> None:
    common = {"temperature": temperature, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = SamplingParams(**common | fields)
    chosen = prompts(plain)[::4]
    ours, theirs = (llm.generate(chosen, params, progress=False) for llm in (drafting, plain))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == other.logprobs
    assert sum(output.num_checked_drafts for output in ours) > 0


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with LLM(draft_scheduling=False, batch_invariant=True) as llm:
        yield llm


@pytest.fixture
def knowing() -> Iterator[LLM]:
    """An engine whose drafts are all right, once `with_oracle` has told it the answer."""
    with LLM(draft_scheduling=False, batch_invariant=True) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_that_equal_the_target_are_all_accepted(plain: LLM, knowing: LLM, params: SamplingParams) -> None:
    prompt = prompts(plain)[3]
    answer = plain.generate([prompt], params, progress=False)[0].token_ids
    with_oracle(knowing, prompt, answer)
    output = knowing.generate([prompt], params, progress=False)[0]
    assert output.token_ids == answer
    assert output.num_accepted_drafts == output.num_checked_drafts > 0
    counts = knowing.stats().drafts
    assert counts is not None and counts.checked.tolist() == counts.accepted.tolist() and counts.checked.all()
    assert knowing.stats().num_steps <= 2 + -(-NUM_TOKENS // 6)


class Whims(CheckAll):
    """Drafts for some steps and rests for some."""

    def __init__(self) -> None:
        self.feeds_head, self.num_rested, self._random = True, 0, random.Random(0)

    def wants_drafts(self, num_rows: int) -> bool:
        self.feeds_head ^= self._random.random() < 0.4
        return self.feeds_head

    def rest(self, num_rows: int, seconds: float) -> None:
        self.num_rested += 1
        self.wants_drafts(num_rows)


@pytest.mark.parametrize("is_async", [False, True])
def test_drafting_that_rests_and_goes_on_changes_no_text(
    plain: LLM, expected: dict[SamplingParams, list[list[int]]], is_async: bool
) -> None:
    with LLM(draft_scheduling=False, batch_invariant=True, async_scheduling=is_async) as llm:
        policy = llm._client.core.executor.speculation._policy = Whims()
        for params, wanted in (expected | {WORDS: texts(plain, WORDS)}).items():
            assert texts(llm, params, 5) == wanted
        stats = llm.stats()
    assert policy.num_rested > 20 and stats.drafts is not None and stats.drafts.mean_accepted > 0.3
    assert stats.num_free_blocks == stats.num_blocks


def test_drafts_after_a_rest_stand_where_they_should(plain: LLM, knowing: LLM) -> None:
    """Those of a head that knows the answer are then all accepted."""
    prompt, params = prompts(plain)[3], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    answer = plain.generate([prompt], params, progress=False)[0].token_ids
    with_oracle(knowing, prompt, answer)
    policy = knowing._client.core.executor.speculation._policy = Whims()
    for _ in range(3):
        output = knowing.generate([prompt], params, progress=False)[0]
        assert output.token_ids == answer
        assert output.num_accepted_drafts == output.num_checked_drafts > 0
    assert policy.num_rested > 0


def test_max_tokens_and_stop_strings_cut_inside_an_accepted_run_as_without_drafts(plain: LLM, knowing: LLM) -> None:
    prompt = prompts(plain)[3]
    answer = plain.generate([prompt], GREEDY, progress=False)[0]
    with_oracle(knowing, prompt, answer.token_ids)
    text = answer.text
    for max_tokens in range(1, 10):
        for stop in ((), (text[2:4],), (text[5:7],), (text[9:11],), (text[1:3], text[-3:])):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop=stop)
            ours, theirs = (llm.generate([prompt], params, progress=False)[0] for llm in (knowing, plain))
            assert (ours.text, ours.token_ids, ours.finish_reason, ours.stop_reason) == (
                theirs.text, theirs.token_ids, theirs.finish_reason, theirs.stop_reason,
            )  # fmt: skip


def test_a_stop_token_inside_an_accepted_run_counts_from_min_tokens_on(plain: LLM, knowing: LLM) -> None:
    prompt = prompts(plain)[3]
    answer = plain.generate([prompt], GREEDY, progress=False)[0].token_ids
    stop = answer[4]
    with_oracle(knowing, prompt, answer)
    for min_tokens in range(0, 9):
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), min_tokens=min_tokens
        )
        ours, theirs = (llm.generate([prompt], params, progress=False)[0] for llm in (knowing, plain))
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        if min_tokens <= 2:  # the answer holds an end token there, which min_tokens excludes
            assert ours.token_ids == answer[:5]
            assert ours.num_accepted_drafts == 4  # after the prompt's token one step gave all
        assert stop not in ours.token_ids[:min_tokens] and (ours.token_ids[-1] == stop or len(ours.token_ids) == 12)


DRAWN = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)


@pytest.mark.parametrize(("is_async", "reads_signs"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "params",
    [[GREEDY], [DRAWN], [GREEDY, replace(DRAWN, logprobs=2), replace(GREEDY, logprobs=1, max_tokens=9)]],
    ids=["greedy", "drawn", "mixed"],
)
def test_drafts_follow_a_captured_step_as_if_the_host_had_checked_it(
    monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams], is_async: bool, reads_signs: bool
) -> None:
    monkeypatch.setattr("deepinfer.runner.build.captures_steps", lambda options, ops: True)
    monkeypatch.setattr("deepinfer.runner.build.CudaRecorder", FakeRecorder)
    monkeypatch.setattr("deepinfer.runner.graph_cache.RIPE", 1)
    follow, found = Speculation.follow, []
    for is_on in (True, False):
        followed: list[bool] = []
        monkeypatch.setattr(Speculation, "follow", lambda *given, to=followed: to.append(follow(*given)) or to[-1])
        if not is_on:
            monkeypatch.setattr("deepinfer.runner.draft_graphs.DraftGraphs.follow", lambda *given: None)
        with LLM(draft_scheduling=False, batch_invariant=True, async_scheduling=is_async, max_num_requests=8) as llm:
            llm._client.core.executor.speculation._policy.reads_signs = reads_signs
            chosen = prompts(llm)
            outputs = llm.generate(chosen, [params[i % len(params)] for i in range(len(chosen))], progress=False)
            drafts = llm.stats().drafts
            assert llm.stats().num_free_blocks == llm.stats().num_blocks
        assert drafts is not None and drafts.mean_accepted > 0.3 and (sum(followed) > 5) is is_on
        answers = [(one.token_ids, one.logprobs, one.num_checked_drafts, one.num_accepted_drafts) for one in outputs]
        found.append((answers, drafts.as_dict()))
    assert found[0] == found[1]


def test_rejection_keeps_greedy_texts_and_accepts_drafts(expected: dict[SamplingParams, list[list[int]]]) -> None:
    with LLM(draft_acceptance="rejection", draft_scheduling=False, batch_invariant=True) as llm:
        assert texts(llm, GREEDY) == expected[GREEDY]
        before = llm.stats().drafts
        sampled = texts(llm, SEEDED)
        after = llm.stats().drafts
        assert sampled == texts(llm, SEEDED)
    assert before is not None and after is not None
    assert after.accepted.sum() - before.accepted.sum() > 20
    assert sampled != expected[SEEDED]


def test_more_drafts_than_the_head_makes_are_refused_and_none_needs_no_head() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens is 6, but the draft head of this model makes 5"):
        LLM(num_draft_tokens=6)


def test_the_padding_slot_and_block_stay_zero(drafting: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    drafting.generate(prompts(drafting), params, progress=False)
    pools = drafting._client.core.executor.model.pools
    assert not pools.slots[0].any() and not pools.blocks[0].any()
    assert np.count_nonzero(pools.slots[1]) > 0
