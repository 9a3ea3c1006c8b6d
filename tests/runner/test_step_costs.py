"""Step times are measured once and read from then on."""

from __future__ import annotations

import json

import pytest

import goldens
from deepinfer import LLM, SamplingParams
from deepinfer.runner import step_costs


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepinfer" / "steps"


def policy_of(llm):
    return llm._client.core.executor.speculation._policy


def open_llm(**options):
    return LLM(goldens.CHECKPOINT, device="cpu", max_num_requests=3, **options)


def test_times_are_measured_kept_and_read_again(folder, monkeypatch):
    with open_llm() as llm:
        policy = policy_of(llm)
        pools = llm._client.core.executor.model.pools
        assert not pools.slots.any() and not pools.blocks.any(), "measuring left something in the caches"
    assert policy.step_costs.counts == [1, 2, 4, 15] and policy.draft_costs.counts == [1, 3]
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    assert len(kept["steps"]) == 4 and len(kept["drafting"]) == 2 and min(kept["steps"]) > 0
    monkeypatch.setattr(step_costs, "_best", lambda run, num_runs: pytest.fail("measured again"))
    with open_llm() as llm:
        assert policy_of(llm).step_costs.times == sorted(policy_of(llm).step_costs.times)
    with pytest.raises(BaseException, match="measured again"):
        open_llm(num_draft_tokens=2)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"steps": [1, 2], "drafting": [1]}', '{"steps": [1, 2, 3, -4], "drafting": [1, 2]}', "\x00"]
)
def test_a_file_that_is_no_use_is_measured_anew(folder, text):
    with open_llm():
        (file,) = folder.iterdir()
    file.write_text(text)
    with open_llm():
        assert len(json.loads(file.read_text())["steps"]) == 4


def test_a_folder_that_cannot_be_written_costs_only_the_time(folder, caplog):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    with open_llm() as llm:
        assert len(policy_of(llm).step_costs.times) == 4


@pytest.mark.parametrize(
    "options", [{"max_num_requests": 1, "max_step_tokens": 1}, {"max_model_len": 3}, {"num_blocks": 1}]
)
def test_the_smallest_engines_measure_and_answer(options):
    with LLM(goldens.CHECKPOINT, device="cpu", **options) as llm:
        output = llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 2


def test_without_scheduling_nothing_is_measured(folder):
    with open_llm(draft_scheduling=False):
        assert not folder.exists()
