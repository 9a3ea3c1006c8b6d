"""The draft head against the oracle's golden drafts: end to end in float32, on the oracle's inputs in exact."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
import v41_oracle as oracle
from safetensors.torch import load_file

import goldens
from drafting import Drafting, relative
from ops import golden
from ops.world import make_batch

ALL_CASES = json.loads((goldens.ROOT / "goldens" / "goldens.json").read_text())["drafts"]
CASES = [
    case for number, case in enumerate(ALL_CASES) if number % 3 == 0 or case["position"] in (1, 15, 16, 32, 99, 199)
]
IDS = [f"{case['prompt']}.{case['position']}" for case in CASES]
LOGITS = load_file(goldens.ROOT / "goldens" / "drafts.safetensors")


def tokens_of(case: dict) -> list[int]:
    """The prompt and its greedy text, up to the position that is drafted after."""
    prompt = goldens.prompt(int(case["prompt"]))
    return [*prompt.tokens, *prompt.greedy][: case["position"] + 1]


def has_logits(case: dict) -> bool:
    """Whether the golden logits were stored, as they are after prompts and not inside texts."""
    return f"{case['prompt']}.{case['position']}.exact.logits" in LOGITS


def test_some_cases_have_golden_logits():
    assert sum(has_logits(case) for case in CASES) >= 4


@cache
def the_oracle(precision: str) -> oracle.Oracle:
    return oracle.Oracle(goldens.CHECKPOINT, precision)


@cache
def main_hidden(prompt: str, precision: str) -> torch.Tensor:
    case = goldens.prompt(int(prompt))
    return the_oracle(precision).forward([*case.tokens, *case.greedy]).main_hidden


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_float32_drafts_from_the_prompt_on_are_the_golden_ones(case: dict):
    drafting = Drafting(goldens.CHECKPOINT, golden.ops("float32"))
    drafting.forward(tokens_of(case), 0)
    drafts, logits, confidence = drafting.propose(case["next_token"], case["position"] + 1)
    expected = case["float32"]
    assert drafts == expected["tokens"]
    assert confidence.tolist() == pytest.approx(expected["confidence"], abs=2e-3)
    if has_logits(case):
        assert np.median(relative(logits, LOGITS[f"{case['prompt']}.{case['position']}.float32.logits"])) <= 1e-5


@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_on_the_oracle_s_main_vectors_the_draft_head_gives_its_bits(case: dict, precision: str):
    drafting = Drafting(goldens.CHECKPOINT, golden.ops(precision))
    position, hidden = case["position"], main_hidden(case["prompt"], precision)[: case["position"] + 1]
    batch = make_batch([(1, 0, position + 1)], block_tokens=drafting.block_tokens)
    drafting.bound.draft.store_main(hidden.unflatten(1, (-1, drafting.config.hidden_size)), batch)
    drafts, logits, confidence = drafting.propose(case["next_token"], position + 1)
    expected = case[precision]
    assert drafts == expected["tokens"]
    assert confidence.tolist() == pytest.approx(expected["confidence"], abs=1e-5)
    if has_logits(case):
        assert relative(logits, LOGITS[f"{case['prompt']}.{position}.{precision}.logits"]).max() <= 1e-6
