"""Every parameter: with drafts or without, alone or in a changing batch, chunked or whole, the answer is one (nano)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import deepinfer
from deepinfer import LLM
from deepinfer.backends.cpu.library import is_available
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.sampling.params import declared
from parameter_cases import cases, choices

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
VALUES = choices(4096)
CASES = cases(VALUES, num_mixed=10)
DRAFTS = {"drafts": {"draft_scheduling": False}, "no drafts": {"num_draft_tokens": 0}}
CHUNKS = {"whole": {}, "chunked": {"max_chunk_tokens": 7, "max_step_tokens": 64}}


def found(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Everything of the answers that shall not depend on how the engine ran them."""
    return [
        (
            one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, one.prompt_logprobs,
            (one.error or "").partition(":")[2],
        )
        for one in output.outputs
    ]  # fmt: skip


def run(llm: LLM, batch: int) -> list[RequestOutput]:
    records = [json.loads(line) for line in EVAL.read_text().splitlines()]
    texts = [one["prompt"] for one in records if "image" not in one["skill"] and 10 < len(one["prompt"]) < 80]
    prompts = texts[:: len(texts) // len(CASES)]
    outputs: list[RequestOutput] = []
    for first in range(0, len(CASES), batch):
        now = slice(first, min(first + batch, len(CASES)))
        outputs += llm.generate(prompts[now], CASES[now], progress=False)
    return outputs


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str, str], list[RequestOutput]]:
    """Outputs by drafts, chunks and batch; batches change, since more requests come than run at a time."""
    results = {}
    for (drafts, some), (chunks, more) in itertools.product(DRAFTS.items(), CHUNKS.items()):
        with LLM(batch_invariant=True, max_num_requests=8, num_blocks=64, **some, **more) as llm:
            for batch, size in (("alone", 1), ("batch", len(CASES))):
                results[drafts, chunks, batch] = run(llm, size)
    return results


def test_every_declared_parameter_has_a_case() -> None:
    assert set(VALUES) == {spec.name for spec in declared()}
    for spec in declared():
        assert any(getattr(params, spec.name) != spec.default for params in CASES), spec.name


@pytest.mark.parametrize("way", list(itertools.product(DRAFTS, CHUNKS, ("alone", "batch"))), ids=", ".join)
@pytest.mark.skipif(not is_available(), reason="answers are compared bit for bit, which needs a C++ compiler")
def test_answers_do_not_depend_on_how_they_are_computed(
    runs: dict[tuple[str, str, str], list[RequestOutput]], way: tuple[str, str, str]
) -> None:
    expected = runs["no drafts", "whole", "alone"]
    for params, output, wanted in zip(CASES, runs[way], expected, strict=True):
        assert found(output) == found(wanted), params
    assert sum(output.num_accepted_drafts for output in runs[way]) > 50 * (way[0] == "drafts") - 1
    assert sum(output.finish_reason == "error" for output in expected) < 5
    assert len({tuple(output.token_ids) for output in expected}) > len(CASES) // 2
