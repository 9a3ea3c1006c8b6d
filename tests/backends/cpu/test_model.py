"""Models on the native ops: close to the oracle, and bit for bit the same however requests are put together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import make_checkpoint
import numpy as np
import pytest

import goldens
from backends.cpu import pair
from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.backends import select
from deepinfer.backends.cpu import matrix
from engine.test_same_tokens import mixed_prompts
from model.test_random_configs import draw_shape

DRAW = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
FAST = {"precision": "fast", "device": "cpu", "batch_invariant": True}


def results(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[object, ...]]]:
    """Tokens of each request with the log-probabilities, to the last bit, of what might have stood there."""
    outputs = llm.generate(prompts, DRAW)
    return [[(entry.token_id, entry.logprob, *entry.top) for entry in output.logprobs] for output in outputs]


@pytest.fixture(scope="module", autouse=True, params=["vectors", "tiles"])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to multiply; plain code stands in for tiles that the processor lacks."""
    with pair.tiles(request.param == "tiles"):
        yield


@pytest.fixture(scope="module")
def llm(kind: None) -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, max_num_requests=32, **FAST) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[tuple[object, ...]]]:
    return [results(llm, [prompt])[0] for prompt in mixed_prompts(32)]


@pytest.fixture(scope="module")
def unrounded(kind: None) -> Iterator[LLM]:
    """Without rounded inputs: then a last bit decides only the rounding of cached values, as in `float32`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "ROUNDS_INPUTS", False)
        llm = LLM(goldens.CHECKPOINT, **FAST)
    with llm:
        yield llm


@pytest.mark.parametrize("length", goldens.LENGTHS)
def test_logits_agree_with_the_oracle(unrounded: LLM, length: int) -> None:
    with pair.tiles(False):  # matrices stay as they are packed; attention by tiles rounds
        ours = unrounded.score(goldens.prompt(length).tokens)
    difference = goldens.relative_difference(ours, goldens.logits(length, "float32"))
    assert np.median(difference) <= 2e-6  # float32 sums
    # a last bit may decide the rounding of a cached value, and that an expert; torch's ops are no closer
    assert difference.max() <= 0.3


@pytest.mark.parametrize("size", [2, 7, 32])
def test_a_batch_changes_no_bit_of_a_request(llm: LLM, alone: list[list[tuple[object, ...]]], size: int) -> None:
    for first in range(0, 32 - size + 1, size):
        assert results(llm, mixed_prompts(32)[first : first + size]) == alone[first : first + size]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunks_change_no_bit_of_a_request(alone: list[list[tuple[object, ...]]], chunk: int) -> None:
    with LLM(goldens.CHECKPOINT, max_num_requests=8, max_chunk_tokens=chunk, **FAST) as llm:
        assert results(llm, mixed_prompts(32)[:10]) == alone[:10]


def test_preemption_and_threads_change_no_bit_of_a_request(alone: list[list[tuple[object, ...]]]) -> None:
    prompts = [prompt for prompt in mixed_prompts(32) if len(prompt) > 100]
    expected = [result for prompt, result in zip(mixed_prompts(32), alone, strict=True) if len(prompt) > 100]
    few = {"max_num_requests": 16, "num_blocks": 3, "max_step_tokens": 64, "num_draft_tokens": 0}
    with LLM(goldens.CHECKPOINT, num_threads=2, **few, **FAST) as llm:
        assert results(llm, prompts) == expected
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("seed", range(100, 112))
def test_a_random_model_computes_what_the_reference_computes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(make_checkpoint.SHAPES, "random", draw_shape(seed))
    make_checkpoint.make_checkpoint("random", tmp_path, seed)
    tokens = np.random.default_rng(seed).integers(3, 600, 75).tolist()
    options = {"max_num_requests": 4, "max_chunk_tokens": Random(seed).choice([None, 1, 5, 32])}
    monkeypatch.setattr(matrix, "ROUNDS_INPUTS", False)
    with LLM(tmp_path, device="cpu", **options) as llm, pair.tiles(False):  # attention by tiles rounds
        ours = llm.score(tokens)
    with LLM(tmp_path, device="cpu", precision="float32", **options) as llm:
        difference = goldens.relative_difference(ours, llm.score(tokens))
    assert np.median(difference) <= 1e-4  # bounds as in tests/model/test_random_configs.py
    assert difference.max() <= 5e-2


def test_other_precisions_stay_on_the_reference() -> None:
    for precision in ("exact", "float32"):
        with pytest.raises(ConfigError, match="batch_invariant"):
            LLM(goldens.CHECKPOINT, device="cpu", precision=precision, batch_invariant=True)


def test_without_the_library_a_model_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="compiler"):
        LLM(goldens.CHECKPOINT, **FAST)
    with LLM(goldens.CHECKPOINT, device="cpu") as llm:
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
