"""The small model that ships with the package answers as its model card says.

The whole skills file takes minutes (`deepinfer eval`, figures in docs/benchmarks.md); here stand two
records of each skill, the longest texts once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer import LLM
from deepinfer.cli.eval import NANO_EVAL, Record, make_record, read_card, run_greedy, score_losses, select_lines

LONG = {"needle_2k": "needle_2k-4", "needle_4k": "needle_4k-1"}  # 1,300 and 2,700 tokens
CARD_LOSS, LOSS_BOUND = 0.0244, 0.03  # nats a token over all records; these few scatter around it


def choose(llm: LLM) -> list[Record]:
    lines, _ = select_lines(NANO_EVAL.read_text(encoding="utf-8"), None, 5)
    chosen = [line for line in lines if line["id"] in LONG.values()]
    chosen += [line for line in lines if line["skill"] not in LONG and line["id"].endswith(("-0", "-1"))]
    return [make_record(line, llm) for line in chosen]


@pytest.fixture(scope="module")
def records() -> Iterator[list[Record]]:
    with LLM(device="cpu") as llm:
        chosen = choose(llm)
        run_greedy(llm, chosen)
        score_losses(llm, [record for record in chosen if record.skill not in LONG])
    yield chosen


def off_the_card(records: list[Record]) -> list[str]:
    card = read_card(NANO_EVAL)
    assert card is not None and len(records) == 84
    return [record.id for record in records if record.is_exact == (record.id in card.misses)]


def test_each_skill_is_at_most_one_record_off_the_card(records: list[Record]) -> None:
    off = off_the_card(records)
    assert len({name.rsplit("-", 1)[0] for name in off}) == len(off) <= 3, off


def test_loss_over_reference_completions_is_near_the_card(records: list[Record]) -> None:
    scored = [record for record in records if record.loss is not None]
    assert len(scored) == 82
    loss = sum(record.loss or 0.0 for record in scored) / sum(len(record.completion_ids) for record in scored)
    assert abs(loss - CARD_LOSS) <= LOSS_BOUND


def test_bounded_replay_changes_no_skill_by_more_than_one_record(records: list[Record]) -> None:
    with LLM(device="cpu", decoder_replay="bounded") as llm:
        bounded = choose(llm)
        run_greedy(llm, bounded)
    changed = [one.id for one, other in zip(records, bounded, strict=True) if one.is_exact != other.is_exact]
    assert len({name.rsplit("-", 1)[0] for name in changed}) == len(changed) <= 3, changed
