"""The small model that ships with the package answers as its model card says.

The whole skills file takes minutes (`deepinfer eval`, figures in docs/benchmarks.md); here stands one
record of each skill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from deepinfer import LLM
from deepinfer.cli.eval import NANO_EVAL, Record, make_record, read_card, run_greedy, score_losses, select_lines

# 1,300 and 2,700 tokens; the first records of these skills are among the card's misses
LONG = {"needle_2k": "needle_2k-4", "needle_4k": "needle_4k-1"}
BEYOND_KEEP = ("needle", "needle_2k", "needle_4k", "tool_call", "tool_use")  # prompts longer than 140 tokens
# nats a token over the 44 short records here (all records with text only: 0.0235, card 0.0244), measured in `fast`
LOSS, LOSS_BOUND = 0.0183, 0.003


def choose(llm: LLM, skills: Collection[str] | None = None) -> list[Record]:
    lines = select_lines(NANO_EVAL.read_text(encoding="utf-8"), None, None)
    first: dict[str, dict[str, Any]] = {}
    for line in lines:
        if (skills is None or line["skill"] in skills) and line["id"] == LONG.get(line["skill"], line["id"]):
            first.setdefault(line["skill"], line)
    return [make_record(line, llm) for line in first.values()]


@pytest.fixture(scope="module")
def records() -> Iterator[list[Record]]:
    with LLM(device="cpu") as llm:
        chosen = choose(llm)
        run_greedy(llm, chosen)
        score_losses(llm, [record for record in chosen if record.skill not in LONG])
    yield chosen


def off_the_card(records: list[Record]) -> list[str]:
    card = read_card(NANO_EVAL)
    assert card is not None and len(records) == 46
    return [record.id for record in records if record.is_exact == (record.id in card.misses)]


def test_at_most_two_records_are_off_the_card(records: list[Record]) -> None:
    off = off_the_card(records)  # there is one record a skill
    assert len(off) <= 2, off


def test_loss_over_reference_completions(records: list[Record]) -> None:
    scored = [record for record in records if record.loss is not None]
    assert len(scored) == 44
    loss = sum(record.loss or 0.0 for record in scored) / sum(len(record.completion_ids) for record in scored)
    assert abs(loss - LOSS) <= LOSS_BOUND


def test_bounded_replay_changes_at_most_one_answer(records: list[Record]) -> None:
    with LLM(device="cpu", decoder_replay="bounded") as llm:
        bounded = choose(llm, BEYOND_KEEP)
        run_greedy(llm, bounded)
    whole = {record.id: record.is_exact for record in records}
    assert len(bounded) == 5 and min(len(record.prompt_ids) for record in bounded) > 140
    assert sum(whole[record.id] != record.is_exact for record in bounded) <= 1
