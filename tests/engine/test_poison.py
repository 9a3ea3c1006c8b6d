"""No byte of a cache counts before its request wrote it, and the padding rows are never written (golden model)."""

from __future__ import annotations

from typing import Any

import pytest

import goldens
from deepinfer import LLM, SamplingParams

POISON = 0xFF  # NaN as e4m3, ue8m0 or float32, and token -1
STREAM = goldens.prompt(200).tokens + goldens.prompt(33).tokens
PROMPTS = [STREAM[start : start + length] for start, length in ((0, 1), (3, 2), (5, 17), (9, 122), (0, 130), (30, 126))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine(**options: Any) -> LLM:
    return LLM(goldens.CHECKPOINT, precision="float32", **{"max_num_requests": 6, "num_blocks": 16} | options)


def poison(llm: LLM) -> Any:
    """Fill both pools but for their padding rows; returns the pools."""
    pools = llm._client.core.executor.model.pools
    for pool in (pools.blocks, pools.slots):
        pool[1:] = POISON
    return pools


def is_clean(pools: Any) -> bool:
    return not pools.blocks[0].any() and not pools.slots[0].any()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine() as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_chunk_tokens": 7},
        {"max_chunk_tokens": 1, "max_num_requests": 3},
        {"num_blocks": 3, "max_num_requests": 3},
        {"decoder_replay": "bounded", "replay_keep_tokens": 140},
    ],
    ids=str,
)
def test_poisoned_caches_change_no_token(expected: list[list[int]], options: dict[str, Any]) -> None:
    with engine(**options) as llm:
        pools = poison(llm)
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        if "num_blocks" in options:
            assert llm.stats().num_preemptions > 0
        assert is_clean(pools)


@pytest.mark.parametrize("keep", [3, 40])
def test_bounded_replay_reads_no_window_vector_that_it_never_wrote(keep: int) -> None:
    found = []
    for is_poisoned in (False, True):
        with engine(decoder_replay="bounded", replay_keep_tokens=keep, max_chunk_tokens=20) as llm:
            if is_poisoned:
                poison(llm)
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


def test_padding_rows_stay_zero_through_mixed_requests_aborts_and_preemptions(expected: list[list[int]]) -> None:
    with engine(num_blocks=3, max_num_requests=3, max_chunk_tokens=50) as llm:
        pools = poison(llm)
        for round_number in range(2):
            for index, prompt in enumerate(PROMPTS):
                for number, _delta in enumerate(llm.stream(prompt, GREEDY)):
                    if number == (index + round_number) % 5:
                        break  # aborted, with a step in flight
            poison(llm)
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
            llm.score(PROMPTS[3])
        assert llm.stats().num_preemptions > 0 and llm.stats().num_free_blocks == 3
        assert is_clean(pools)
        assert pools.blocks[1:].any() and (pools.slots[1:] != POISON).any(), "nothing was written at all"
