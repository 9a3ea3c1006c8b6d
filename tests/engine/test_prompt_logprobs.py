"""Log-probabilities of prompts and answers: the oracle's, and the same however the engine runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import goldens
from deepinfer import LLM, SamplingParams
from deepinfer.frontend.outputs import TokenLogprobs
from deepinfer.runner import runner

LONG = goldens.prompt(200).tokens
PROMPTS = [LONG, LONG[:1], LONG[5:7], LONG[3:60], LONG[40:190]]
ONE = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=3)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check_lines(
    lines: list[TokenLogprobs], targets: list[int], expected: NDArray[np.float64], typical: float, worst: float
) -> None:
    """Values, ranks and alternatives of lines against whole rows of log-probabilities."""
    differences = []
    for line, target, row in zip(lines, targets, expected, strict=True):
        assert line.token_id == target
        differences.append(abs(line.logprob - row[target]))
        best = np.sort(row)[::-1][: len(line.top)]
        differences += np.abs([value for _, value in line.top] - best).tolist()
        assert abs(line.rank - 1 - int((row > row[target]).sum())) <= int((np.abs(row - row[target]) < worst).sum())
    assert np.median(differences) <= typical and max(differences) <= worst


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    with LLM(goldens.CHECKPOINT, batch_invariant=True, max_num_requests=8, num_blocks=64) as llm:
        return [llm.generate(prompt, ONE)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("length", goldens.LENGTHS)
def test_prompts_have_the_oracle_s_logprobs(golden: LLM, length: int) -> None:
    tokens = goldens.prompt(length).tokens
    output = golden.generate(tokens, ONE)[0]
    first, *lines = output.prompt_logprobs
    assert first is None and len(output.prompt_logprobs) == length
    if lines:
        expected = log_softmax(goldens.logits(length, "float32")[:-1])
        check_lines(lines, tokens[1:], expected, typical=1e-5, worst=5e-2)  # see tests/oracle/README.md on rare flips


def test_answers_have_the_oracle_s_logprobs(golden: LLM) -> None:
    params = SamplingParams(golden_token_ids=LONG[120:], logprobs=5)
    output = golden.generate(LONG[:120], params)[0]
    expected = log_softmax(goldens.logits(200, "float32")[119:-1])
    check_lines(output.logprobs, LONG[120:], expected, typical=1e-4, worst=0.1)  # decode steps add up in another order


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 7},
        {"max_step_tokens": 33},
        {"num_blocks": 2, "max_step_tokens": 32},
        {"decoder_replay": "bounded", "replay_keep_tokens": 20},
    ],
    ids=["single tokens", "chunks of 7", "mixed", "preempted", "bounded replay"],
)
def test_they_are_the_same_bits_however_the_prompt_is_cut(whole: list[Any], options: dict[str, Any]) -> None:
    options = {"max_num_requests": 8, "num_blocks": 64} | options
    with LLM(goldens.CHECKPOINT, batch_invariant=True, **options) as llm:
        for _ in range(2):  # twice is once
            outputs = llm.generate(PROMPTS, ONE)
            for output, expected in zip(outputs, whole, strict=True):
                assert output.prompt_logprobs == expected.prompt_logprobs
                assert output.token_ids == expected.token_ids


def test_only_a_part_of_the_logits_is_on_the_device_at_a_time(whole: list[Any], monkeypatch: Any) -> None:
    options = {"max_num_requests": 8, "num_blocks": 64, "num_draft_tokens": 0}
    with LLM(goldens.CHECKPOINT, batch_invariant=True, **options) as llm:
        model = llm._client.core.executor.model
        sizes, logits = [], model.logits
        monkeypatch.setattr(runner, "PROMPT_PART", 16)
        monkeypatch.setattr(model, "logits", lambda hidden: sizes.append(len(hidden.pre)) or logits(hidden))
        outputs = llm.generate(PROMPTS, ONE)
    assert max(sizes) == 16 and sum(sizes) == sum(map(len, PROMPTS)) - len(PROMPTS)
    assert [output.prompt_logprobs for output in outputs] == [output.prompt_logprobs for output in whole]


def test_only_those_who_ask_get_them() -> None:
    plain = SamplingParams(max_tokens=2, temperature=0.0)
    with LLM(goldens.CHECKPOINT, batch_invariant=True, max_num_requests=8, num_blocks=64) as llm:
        none, some = llm.generate([LONG[:9], LONG[:9]], [plain, ONE])
        deltas = list(llm.stream(LONG[:9], ONE))
    assert none.prompt_logprobs is None and len(some.prompt_logprobs) == 9
    assert deltas[0].prompt_logprobs == some.prompt_logprobs
    assert [delta.prompt_logprobs for delta in deltas[1:]] == [None] * (len(deltas) - 1)
