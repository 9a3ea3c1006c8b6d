"""The whole model against the oracle's golden logits and greedy texts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import goldens
from deepinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, precision="float32") as llm:
        yield llm


@pytest.mark.parametrize("length", goldens.LENGTHS)
def test_float32_logits_agree_with_the_oracle_at_every_position(llm: LLM, length: int) -> None:
    ours = llm.score(goldens.prompt(length).tokens)
    difference = goldens.relative_difference(ours, goldens.logits(length, "float32"))
    assert np.median(difference) <= 1e-6
    assert difference.max() <= 1e-2


@pytest.mark.parametrize("length", goldens.LENGTHS)
def test_exact_logits_are_the_oracle_s_at_most_positions(length: int) -> None:
    with LLM(goldens.CHECKPOINT, precision="exact", device="cpu") as llm:
        difference = goldens.relative_difference(
            llm.score(goldens.prompt(length).tokens), goldens.logits(length, "exact")
        )
    # The same bits, but where a last bit of a sum decides a rounding; from there on all positions move.
    assert np.median(difference) == 0.0
    assert difference.max() <= (1e-2 if length < 200 else 0.3)


def test_float32_greedy_text_is_the_golden_one_where_it_is_steady(llm: LLM) -> None:
    prompts = [goldens.prompt(length) for length in goldens.LENGTHS]
    outputs = llm.generate([case.tokens for case in prompts], GREEDY)
    for case, output in zip(prompts, outputs, strict=True):
        assert output.token_ids[: case.steady] == case.greedy[: case.steady]


def test_exact_greedy_text_is_the_golden_one_where_it_is_steady() -> None:
    prompts = [goldens.prompt(length) for length in goldens.LENGTHS]
    with LLM(goldens.CHECKPOINT, precision="exact") as llm:
        outputs = llm.generate([case.tokens for case in prompts], GREEDY)
    for case, output in zip(prompts, outputs, strict=True):
        assert output.token_ids[: case.steady] == case.greedy[: case.steady]
