"""BatchBuilder: plans by hand, tensors by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.messages import StepPlan
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import build
from deepinfer.runner.batch import BatchBuilder, logit_positions

RING_LENGTH, BLOCK_TOKENS, WINDOW = 4, 8, 6


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plan(rows: list[dict[str, Any]], host: list[int], changes: list[tuple[int, int, int]] = ()) -> StepPlan:
    """Rows as dicts of slot, start, count and whatever differs from a sampling prefill row of a full replay."""
    rows = [{"decoder_start": 0, "is_prefill": True, "samples": True, "wants_logits": False} | row for row in rows]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    slots, tables, blocks = (int32(*(change[part] for change in changes)) for part in range(3))
    return StepPlan(
        step=1, slots=columns["slot"].astype(np.int32), starts=columns["start"].astype(np.int32),
        counts=columns["count"].astype(np.int32), decoder_starts=columns["decoder_start"].astype(np.int32),
        is_prefill=columns["is_prefill"], samples=columns["samples"], wants_logits=columns["wants_logits"],
        host_tokens=int32(*host), table_slots=slots, table_columns=tables, table_blocks=blocks,
    )  # fmt: skip


@pytest.fixture
def builder() -> BatchBuilder:
    """Four slots of three blocks; ring entry [slot, place] holds 100 * slot + place."""
    ring = torch.arange(5).unsqueeze(1) * 100 + torch.arange(RING_LENGTH)
    return BatchBuilder(build({"reference": reference_ops("fast")}), 4, 3, BLOCK_TOKENS, ring.int(), WINDOW)


MIXED = [
    {"slot": 3, "start": 9, "count": 1, "is_prefill": False},
    {"slot": 1, "start": 6, "count": 1, "is_prefill": False, "decoder_start": 4},
    {"slot": 2, "start": 0, "count": 3, "samples": False, "decoder_start": 5},
    {"slot": 4, "start": 2, "count": 4, "decoder_start": 4},
]
HOST = [11, 12, 13, 21, 22, 23, 24]


def test_tokens_of_decode_rows_come_from_the_ring_and_those_of_prefill_rows_from_the_host(
    builder: BatchBuilder,
) -> None:
    batch = builder.build(plan(MIXED, HOST))
    assert batch.tokens.tolist() == [301, 102, *HOST]  # places 9 % 4 and 6 % 4
    assert batch.tokens.dtype == torch.int64 and batch.is_image is None


def test_the_encoder_computes_every_token(builder: BatchBuilder) -> None:
    encoder = builder.build(plan(MIXED, HOST)).encoder
    assert encoder.positions.tolist() == [9, 6, 0, 1, 2, 2, 3, 4, 5]
    assert encoder.rows.tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 3]
    assert encoder.row_offsets.tolist() == [0, 1, 2, 5, 9]
    assert encoder.row_starts.tolist() == [9, 6, 0, 2]
    assert encoder.row_slots.tolist() == [3, 1, 2, 4]
    assert encoder.window_starts.tolist() == [0, 0, 0, 0]
    assert (encoder.max_position, encoder.num_tokens, encoder.block_tokens) == (9, 9, BLOCK_TOKENS)
    for tensor in (encoder.positions, encoder.rows, encoder.row_offsets, encoder.block_table):
        assert tensor.dtype == torch.int32


def test_the_decoder_gets_the_tokens_from_each_decoder_start_on(builder: BatchBuilder) -> None:
    batch = builder.build(plan(MIXED, HOST))
    decoder = batch.decoder
    assert batch.decoder_tokens.tolist() == [0, 1, 7, 8]
    assert decoder.positions.tolist() == [9, 6, 4, 5]
    assert decoder.rows.tolist() == [0, 1, 3, 3]
    assert decoder.row_offsets.tolist() == [0, 1, 2, 2, 4], "row 2 keeps its place, with no token"
    assert decoder.row_starts.tolist() == [9, 6, 5, 4]
    assert decoder.window_starts.tolist() == [0, 4, 5, 4]
    assert batch.logit_tokens.tolist() == [0, 1, 3], "indices into the decoder's tokens"


def test_a_step_without_decoder_tokens_has_an_empty_decoder_batch(builder: BatchBuilder) -> None:
    batch = builder.build(plan([{"slot": 1, "start": 0, "count": 3, "samples": False, "decoder_start": 3}], [5, 6, 7]))
    assert batch.decoder_tokens.tolist() == batch.logit_tokens.tolist() == batch.decoder.positions.tolist() == []
    assert (batch.decoder.max_position, batch.decoder.num_tokens) == (-1, 0)
    assert batch.decoder.row_offsets.tolist() == [0, 0] and batch.decoder.block_table.shape == (1, 0)


def test_full_replay_has_one_batch_for_both_halves(builder: BatchBuilder) -> None:
    batch = builder.build(plan([{"slot": 1, "start": 0, "count": 2}, {"slot": 2, "start": 0, "count": 1}], [5, 6, 7]))
    assert batch.decoder is batch.encoder and batch.decoder_tokens is None
    assert batch.logit_tokens.tolist() == [1, 2]


def test_a_step_of_decoder_tokens_alone_still_has_windows_of_its_own(builder: BatchBuilder) -> None:
    rows = [
        {"slot": 1, "start": 6, "count": 1, "is_prefill": False, "decoder_start": 4},
        {"slot": 2, "start": 0, "count": 2},
    ]
    batch = builder.build(plan(rows, [5, 6]))
    assert batch.decoder_tokens is None and batch.decoder is not batch.encoder
    assert batch.decoder.window_starts.tolist() == [4, 0] and batch.encoder.window_starts.tolist() == [0, 0]
    assert batch.decoder.positions.tolist() == batch.encoder.positions.tolist()
    assert batch.decoder.row_starts.tolist() == [6, 0]


def test_logits_of_sampling_rows_come_before_whole_rows(builder: BatchBuilder) -> None:
    rows = [
        {"slot": 1, "start": 0, "count": 3, "samples": False, "wants_logits": True},
        {"slot": 2, "start": 0, "count": 2, "wants_logits": True},
        {"slot": 3, "start": 0, "count": 2},
    ]
    step = plan(rows, [1] * 7)
    assert builder.build(step).logit_tokens.tolist() == [4, 6, 0, 1, 2, 3, 4]
    assert logit_positions(step, np.array([0, 3, 5, 7])).tolist() == [4, 6, 0, 1, 2, 3, 4]


def test_prompt_tokens_to_be_scored_come_last_and_only_those_before_a_target(builder: BatchBuilder) -> None:
    rows = [
        {"slot": 1, "start": 0, "count": 3, "wants_logits": True},
        {"slot": 2, "start": 4, "count": 1},
        {"slot": 3, "start": 0, "count": 3, "samples": False},
    ]
    step = plan(rows, [1] * 7)
    step.logprob_rows, step.logprob_counts, step.logprob_targets = int32(0, 2), int32(2, 3), int32(1, 1, 1, 1, 9)
    assert builder.build(step).logit_tokens.tolist() == [2, 3, 0, 1, 2, 0, 1, 4, 5, 6]


def test_a_step_that_samples_every_row_may_score_too(builder: BatchBuilder) -> None:
    step = plan([{"slot": 1, "start": 0, "count": 1}], [1])
    step.logprob_rows, step.logprob_counts, step.logprob_targets = int32(0), int32(1), int32(5)
    assert builder.build(step).logit_tokens.tolist() == [0, 0]


def test_table_changes_stay_and_only_the_columns_in_use_are_passed_on(builder: BatchBuilder) -> None:
    first = plan([{"slot": 2, "start": 0, "count": 9}], list(range(9)), [(2, 0, 7), (2, 1, 5)])
    assert builder.build(first).encoder.block_table.tolist() == [[7, 5]]
    second = plan([{"slot": 2, "start": 9, "count": 1}, {"slot": 4, "start": 0, "count": 1}], [1, 1], [(4, 0, 3)])
    assert builder.build(second).encoder.block_table.tolist() == [[7, 5], [3, 0]]
    third = plan([{"slot": 4, "start": 1, "count": 1}], [1], [(2, 0, 0), (2, 1, 0), (4, 0, 9)])
    assert builder.build(third).encoder.block_table.tolist() == [[9]]
    assert builder.block_table.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [9, 0, 0]]


def test_newest_tokens_alone_give_all_their_logits_in_order(builder: BatchBuilder) -> None:
    rows = [{"slot": slot, "start": start, "count": 1, "is_prefill": False} for slot, start in ((3, 9), (1, 6))]
    batch = builder.build(plan(rows, []))
    assert batch.tokens.tolist() == [301, 102] and batch.logit_tokens is None
    assert batch.encoder.positions.tolist() == batch.encoder.row_starts.tolist() == [9, 6]
    assert batch.encoder.rows.tolist() == [0, 1] and batch.encoder.row_offsets.tolist() == [0, 1, 2]
    rows[0]["samples"] = False
    assert builder.build(plan(rows, [])).logit_tokens.tolist() == [1]


def test_a_prompt_of_one_token_is_no_newest_token(builder: BatchBuilder) -> None:
    rows = [{"slot": 2, "start": 0, "count": 1}, {"slot": 1, "start": 6, "count": 1, "is_prefill": False}]
    assert builder.build(plan(rows, [77])).tokens.tolist() == [77, 102]


def test_as_many_tokens_as_rows_need_not_be_one_each(builder: BatchBuilder) -> None:
    rows = [{"slot": 2, "start": 0, "count": 2}, {"slot": 1, "start": 6, "count": 0, "samples": False}]
    batch = builder.build(plan(rows, [7, 8]))
    assert batch.tokens.tolist() == [7, 8] and batch.encoder.rows.tolist() == [0, 0]
    assert batch.logit_tokens.tolist() == [1]


@pytest.mark.parametrize(("ahead", "has_own"), [(WINDOW - 2, True), (WINDOW - 1, False)])
def test_windows_that_do_not_reach_the_decoder_start_need_no_batch_of_their_own(
    builder: BatchBuilder, ahead: int, has_own: bool
) -> None:
    rows = [{"slot": 1, "start": 4 + ahead, "count": 1, "is_prefill": False, "decoder_start": 4}]
    batch = builder.build(plan([*rows, {"slot": 2, "start": 3, "count": 1, "is_prefill": False}], []))
    assert (batch.decoder is not batch.encoder) == has_own


def test_a_plain_step_is_built_like_any_other_of_newest_tokens(builder: BatchBuilder) -> None:
    rows = [
        {"slot": 3, "start": 9, "count": 1, "is_prefill": False, "decoder_start": 5},
        {"slot": 1, "start": 6, "count": 1, "is_prefill": False},
    ]
    built = []
    for is_plain in (True, False):
        step = plan(rows, [])
        step.is_plain = is_plain
        assert step.num_tokens == 2
        built.append(builder.build(step))
    plain, other = built
    assert plain.tokens.tolist() == other.tokens.tolist() == [301, 102] and plain.logit_tokens is None
    for one, two in ((plain.encoder, other.encoder), (plain.decoder, other.decoder)):
        for name in ("positions", "rows", "row_offsets", "row_starts", "row_slots", "block_table", "window_starts"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert plain.decoder.window_starts.tolist() == [5, 0]
