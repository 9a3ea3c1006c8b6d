"""From plans to batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.messages import StepPlan
from deepinfer.runner.batch import BatchBuilder

SLOTS, COLUMNS, BLOCK_TOKENS, WINDOW = 4, 5, 4, 6


def builder() -> BatchBuilder:
    """Slot s has the token 100 * s + place in its ring of 3."""
    ring = torch.arange(SLOTS + 1, dtype=torch.int32).unsqueeze(1) * 100 + torch.arange(3, dtype=torch.int32)
    return BatchBuilder(SLOTS, COLUMNS, BLOCK_TOKENS, ring, WINDOW)


def plan(rows, tokens=(), table=(), wants_logits=None) -> StepPlan:
    """rows: (slot, start, count, decoder start, is_prefill, samples); table: (slot, column, block)."""
    slots, starts, counts, decoder_starts, is_prefill, samples = (
        [np.array(part) for part in zip(*rows, strict=True)] if rows else [np.zeros(0, dtype=np.int64)] * 6
    )
    table_slots, table_columns, table_blocks = zip(*table, strict=True) if table else ((), (), ())

    def int32(values) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return StepPlan(
        step=0,
        slots=int32(slots),
        starts=int32(starts),
        counts=int32(counts),
        decoder_starts=int32(decoder_starts),
        is_prefill=is_prefill.astype(np.bool_),
        samples=samples.astype(np.bool_),
        wants_logits=np.array(wants_logits or [False] * len(rows), dtype=np.bool_),
        host_tokens=int32(tokens),
        table_slots=int32(table_slots),
        table_columns=int32(table_columns),
        table_blocks=int32(table_blocks),
    )


def test_newest_tokens_come_from_the_rings():
    batch = builder().build(plan([(3, 7, 1, 0, False, True), (1, 5, 1, 0, False, True)], table=[(3, 1, 9), (1, 0, 2)]))
    assert batch.tokens.tolist() == [301, 102]
    assert batch.decoder is batch.encoder
    assert (batch.decoder_tokens, batch.logit_tokens, batch.is_image) == (None, None, None)
    encoder = batch.encoder
    assert encoder.positions.tolist() == encoder.row_starts.tolist() == [7, 5]
    assert (encoder.rows.tolist(), encoder.row_offsets.tolist()) == ([0, 1], [0, 1, 2])
    assert (encoder.row_slots.tolist(), encoder.window_starts.tolist()) == ([3, 1], [0, 0])
    assert encoder.block_table.tolist() == [[0, 9], [2, 0]]
    assert (encoder.max_position, encoder.block_tokens) == (7, BLOCK_TOKENS)


def test_prompt_tokens_come_from_the_host():
    rows = [(2, 0, 3, 0, True, False), (1, 5, 1, 0, False, True), (4, 8, 2, 0, True, True)]
    batch = builder().build(plan(rows, tokens=[11, 12, 13, 14, 15]))
    assert batch.tokens.tolist() == [11, 12, 13, 102, 14, 15]
    assert batch.encoder.positions.tolist() == [0, 1, 2, 5, 8, 9]
    assert batch.encoder.rows.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.encoder.row_offsets.tolist() == [0, 3, 4, 6]
    assert batch.logit_tokens.tolist() == [3, 5]


def test_a_prompt_of_one_token_is_no_newest_token():
    batch = builder().build(plan([(2, 0, 1, 0, True, True), (1, 4, 1, 0, False, True)], tokens=[77]))
    assert batch.tokens.tolist() == [77, 101]
    assert batch.logit_tokens is None


def test_as_many_tokens_as_rows_need_not_be_one_each():
    batch = builder().build(plan([(2, 0, 2, 0, True, True), (1, 4, 0, 0, False, False)], tokens=[7, 8]))
    assert batch.tokens.tolist() == [7, 8]
    assert batch.encoder.rows.tolist() == [0, 0]
    assert batch.logit_tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("samples", "wants_logits", "expected"),
    [
        ([True, True], [False, False], None),
        ([False, True], [False, False], [1]),
        ([True, True], [True, False], [0, 1, 0]),
        ([False, False], [False, False], []),
    ],
)
def test_logits_are_those_of_sampling_rows_then_those_of_whole_rows(samples, wants_logits, expected):
    rows = [(slot, 4, 1, 0, False, sample) for slot, sample in zip((1, 2), samples, strict=True)]
    found = builder().build(plan(rows, wants_logits=wants_logits)).logit_tokens
    assert found is expected is None or found.tolist() == expected


def test_tokens_before_their_decoder_start_are_cut_off():
    rows = [(1, 0, 4, 9, True, False), (2, 3, 3, 4, True, True), (3, 8, 1, 2, False, True)]
    batch = builder().build(plan(rows, tokens=[1, 2, 3, 4, 5, 6, 7]))
    assert batch.decoder_tokens.tolist() == [5, 6, 7]
    assert batch.logit_tokens.tolist() == [1, 2]
    decoder = batch.decoder
    assert decoder.positions.tolist() == [4, 5, 8]
    assert (decoder.rows.tolist(), decoder.row_offsets.tolist()) == ([1, 1, 2], [0, 0, 2, 3])
    assert (decoder.row_starts.tolist(), decoder.window_starts.tolist()) == ([9, 4, 8], [9, 4, 2])
    assert batch.encoder.window_starts.tolist() == [0, 0, 0]


def test_the_decoder_s_windows_begin_later_only_where_they_reach_back_so_far():
    near = builder().build(plan([(1, 8, 1, 4, False, True), (2, 3, 1, 0, False, True)]))
    assert near.decoder_tokens is None
    assert near.decoder.window_starts.tolist() == [4, 0]
    assert near.decoder.positions.tolist() == near.encoder.positions.tolist()
    far = builder().build(plan([(1, 4 + WINDOW - 1, 1, 4, False, True), (2, 3, 1, 0, False, True)]))
    assert far.decoder is far.encoder


def test_block_tables_keep_what_earlier_plans_wrote():
    one = builder()
    one.build(plan([(1, 0, 1, 0, True, True)], tokens=[5], table=[(1, 0, 3), (1, 1, 4)]))
    assert one.build(plan([(1, 7, 1, 0, False, True)])).encoder.block_table.tolist() == [[3, 4]]
    assert one.build(plan([(1, 3, 1, 0, False, True)], table=[(1, 0, 8)])).encoder.block_table.tolist() == [[8]]


def test_a_plan_without_rows_has_no_tokens():
    batch = builder().build(plan([]))
    assert (batch.encoder.num_tokens, batch.encoder.max_position, len(batch.tokens)) == (0, -1, 0)
