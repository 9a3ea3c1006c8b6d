"""Grammars beside drafts, and what may happen in the middle: texts are those without drafts (nano, native ops)."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from constrained import KINDS
from deepinfer import LLM, SamplingParams
from deepinfer.backends.cpu.library import is_available
from deepinfer.frontend.outputs import RequestOutput
from drafting import with_oracle

pytestmark = pytest.mark.skipif(not is_available(), reason="texts are compared bit for bit, which needs a C++ compiler")

PROMPT = "What is 12 + 30? Answer in one sentence."
WORDS = {"regex": "[a-z]{2,8}( [a-z]{2,8}){1,6}"}
FREE = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(num_draft_tokens=0, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with LLM(draft_scheduling=False, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def knowing() -> Iterator[LLM]:
    """An engine whose drafts are right, once `with_oracle` has told it the answer."""
    with LLM(draft_scheduling=False, batch_invariant=True) as llm:
        yield llm


def told(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, output.error


def both(plain: LLM, knowing: LLM, params: SamplingParams) -> tuple[RequestOutput, RequestOutput]:
    """The answers without drafts, and with drafts that are all right."""
    expected = plain.generate(PROMPT, params)[0]
    with_oracle(knowing, plain.tokenizer.encode(PROMPT), expected.token_ids)
    return expected, knowing.generate(PROMPT, params)[0]


def seeded(form: dict[str, Any], **values: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": form, "temperature": 1.0, "seed": 3, "max_tokens": 40} | values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind_of_grammar_gives_the_text_without_drafts(plain: LLM, drafting: LLM, temperature: float) -> None:
    params = [seeded(form, temperature=temperature, seed=seed) for seed, (form, _) in enumerate(KINDS)]
    ours, theirs = (llm.generate([PROMPT] * len(params), params, progress=False) for llm in (drafting, plain))
    assert [told(one) for one in ours] == [told(one) for one in theirs]
    assert sum(one.num_checked_drafts for one in ours) > 100


def test_drafts_that_follow_the_grammar_are_all_accepted(plain: LLM, knowing: LLM) -> None:
    for form, is_valid in KINDS:
        expected, found = both(plain, knowing, seeded(form))
        assert told(found) == told(expected) and (found.finish_reason == "length" or is_valid(found.text))
        assert found.num_checked_drafts - found.num_accepted_drafts <= 5  # those behind the end
        assert found.num_accepted_drafts >= 3 * len(found.token_ids) // 5 - 3


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_trigger_may_lie_anywhere_in_an_accepted_run(plain: LLM, knowing: LLM, length: int) -> None:
    free = plain.generate(PROMPT, FREE)[0].token_ids
    for start in (0, 2, 5, 6):
        trigger = free[start : start + length]
        for bound in (None, trigger[length // 2]):
            args = {"schema_type": "regex", "schema": "[0-9]{2,6}", "trigger_token_ids": trigger}
            params = SamplingParams(so_args={**args, "bound_token_id": bound}, temperature=1.0, seed=5, max_tokens=24)
            expected, found = both(plain, knowing, params)
            assert told(found) == told(expected) and found.num_accepted_drafts > 0
            rest = expected.token_ids
            places = [at for at in range(len(rest)) if rest[at : at + length] == trigger]
            if places:
                digits = plain.tokenizer.decode(rest[places[0] + length :])
                assert re.fullmatch("[0-9]{0,6}", digits), (start, bound, digits)


def test_several_answers_under_a_grammar_differ_and_are_those_without_drafts(plain: LLM, drafting: LLM) -> None:
    params = seeded(WORDS, n=8, temperature=2.0)
    ours, theirs = (llm.generate(PROMPT, params)[0] for llm in (drafting, plain))
    assert [told(one) for one in ours.outputs] == [told(one) for one in theirs.outputs]
    assert len({one.text for one in ours.outputs}) == 8
    assert all(one.finish_reason == "length" or re.fullmatch(WORDS["regex"], one.text) for one in ours.outputs)


@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_in_the_middle_of_a_grammar_changes_nothing(plain: LLM, is_async: bool) -> None:
    params = [seeded(form, seed=seed, max_tokens=30) for seed, (form, _) in enumerate(KINDS[::2])]
    text = plain.tokenizer.encode(PROMPT * 12)
    prompts = [text[seed : seed + 118 + seed % 9] for seed in range(len(params))]  # answers grow into a second block
    options = {"num_blocks": 3, "max_step_tokens": 64, "max_num_requests": 16, "async_scheduling": is_async}
    with LLM(batch_invariant=True, draft_scheduling=False, **options) as llm:
        llm.generate(["x"] * len(params), [replace(one, max_tokens=1) for one in params])  # grammars are compiled
        ours = llm.generate(prompts, params, progress=False)
        assert llm.stats().num_preemptions > 0 and llm.stats().num_free_blocks == 3
    assert [told(one) for one in ours] == [told(one) for one in plain.generate(prompts, params, progress=False)]


def test_stop_texts_inside_json_cut_where_they_do_without_drafts(plain: LLM, knowing: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["stop", "x"]}}}
    form = {"json": {**schema, "required": ["a", "b"]}}
    whole, _ = both(plain, knowing, seeded(form, max_tokens=150))
    assert set(json.loads(whole.text)) == {"a", "b"}
    for stop in (whole.text[1:4], ":", '"b"', "}", whole.text[-4:-1]):
        for is_kept in (False, True):
            params = seeded(form, stop=stop, include_stop_str_in_output=is_kept, max_tokens=150)
            expected, found = both(plain, knowing, params)
            assert told(found) == told(expected) and found.stop_reason == stop
            assert found.text == whole.text[: whole.text.index(stop) + len(stop) * is_kept]


def test_an_answer_that_must_end_before_min_tokens_ends_by_an_error_with_the_reason(plain: LLM, knowing: LLM) -> None:
    params = seeded({"choice": ["abcdef"]}, min_tokens=30)
    expected, found = both(plain, knowing, params)
    assert told(found)[:4] == told(expected)[:4] and found.finish_reason == "error" and found.text == "abcdef"
    assert "exclude every token" in found.error and "min_tokens" in found.error
    longer, again = both(plain, knowing, seeded({"regex": "[a-z ]{1,40}"}, min_tokens=12))
    assert told(again) == told(longer) and len(again.token_ids) >= 12 and re.fullmatch("[a-z ]{1,40}", again.text)


def test_a_matcher_that_is_killed_again_and_again_changes_nothing(
    plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [seeded(form, seed=seed, max_tokens=60) for seed, (form, _) in enumerate(KINDS * 2)]
    prompts = [PROMPT] * len(params)
    expected = [told(one) for one in plain.generate(prompts, params, progress=False)]
    drafting.generate(prompts[: len(KINDS)], params[: len(KINDS)], progress=False)  # grammars are compiled
    server, killed, waits = drafting._client._grammars._server._process.pid, [], itertools.count()
    link = drafting._client.core.executor.constraints._link
    wait = link.wait

    def killed_meanwhile() -> None:
        """Once in ten times the matcher ends while it fills the masks that are waited for."""
        if next(waits) % 10 == 9:
            for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
                killed.append(child)
        wait()

    monkeypatch.setattr(link, "wait", killed_meanwhile)
    found = drafting.generate(prompts, params, progress=False)
    assert len(killed) >= 3 and [told(one) for one in found] == expected
    assert drafting.stats().num_free_blocks == drafting.stats().num_blocks


def broken(llm: LLM, is_bad: Any) -> Any:
    """Have the sampler see NaN in the lines that is_bad(slots, positions) names; returns what undoes it."""
    sampler = llm._client.core.executor.sampler
    sample = sampler.sample

    def with_nan(logits: Any, slots: Any, positions: Any, *others: Any) -> Any:
        logits[is_bad(slots, positions).nonzero()[0].tolist()] = float("nan")
        return sample(logits, slots, positions, *others[:-1])  # the likeliest tokens are those of before

    sampler.sample = with_nan
    return lambda: setattr(sampler, "sample", sample)


@pytest.mark.parametrize("form", [None, {"regex": "[a-z]{40,60}"}])
def test_a_logit_that_is_not_finite_at_a_draft_ends_that_request_alone(
    plain: LLM, knowing: LLM, form: dict[str, Any] | None
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, structured_outputs=form)
    prompt, short = plain.tokenizer.encode(PROMPT), SamplingParams(seed=5, max_tokens=8, ignore_eos=True)
    expected = plain.generate([prompt, prompt[:4]], [params, short], progress=False)
    with_oracle(knowing, prompt, expected[0].token_ids)
    for place in (3, 4, 7):
        undo = broken(knowing, lambda slots, positions, place=place: positions == len(prompt) + place)
        count = knowing.stats().num_not_finite
        bad, good = knowing.generate([prompt, prompt[:4]], [params, short], progress=False)
        undo()
        assert bad.finish_reason == "error" and bad.token_ids == expected[0].token_ids[:place]
        assert f"the model gave NaN or no finite logit for position {len(prompt) + place}" in bad.error
        assert bad.num_accepted_drafts > 0 and knowing.stats().num_not_finite == count + 1
        assert told(good) == told(expected[1])
    assert told(knowing.generate(prompt, params)[0]) == told(expected[0])


def test_a_logit_that_is_not_finite_behind_a_wrong_draft_is_nobody_s(plain: LLM, knowing: LLM) -> None:
    expected, count = plain.generate(PROMPT, FREE)[0], knowing.stats().num_not_finite
    prompt = plain.tokenizer.encode(PROMPT)
    with_oracle(knowing, prompt, [token ^ 1 for token in expected.token_ids])
    undo = broken(knowing, lambda slots, positions: positions > positions.min())
    found = knowing.generate(prompt, FREE)[0]
    undo()
    assert told(found) == told(expected) and found.num_checked_drafts > 0 == found.num_accepted_drafts
    assert knowing.stats().num_not_finite == count
