from dataclasses import fields, replace

import numpy as np

from deepinfer.messages import SlotSetup, StepPlan
from deepinfer.sampling.params import SamplingParams
from deepinfer.speculate.progress import SlotProgress


def int32(*values):
    return np.array(values, dtype=np.int32)


def plan(rows):
    """Rows of slot, start, count, is_prefill; each samples."""
    slots, starts, counts, is_prefill = (np.array(column) for column in zip(*rows, strict=True))
    nothing, flags = int32(), np.ones(len(rows), dtype=np.bool_)
    return StepPlan(
        1, int32(*slots), int32(*starts), int32(*counts), int32(*slots) * 0 + 2, is_prefill, flags, ~flags,
        int32(*[0] * counts[is_prefill].sum()), nothing, nothing, nothing,
    )  # fmt: skip


def progress():
    """Slots 1 to 3 with limits 10, 11, 12 whose newest tokens are at 8, 9 and 12."""
    made = SlotProgress(3)
    for slot in (1, 2, 3):
        params = SamplingParams(max_tokens=slot + 6, seed=0)
        made.set_slot(SlotSetup(slot, params, 4, int32(0, 0, 0, 0)))
    made.starts[1:] = [8, 9, 12]
    return made


def test_room_ends_at_the_plan_and_at_the_request_s_limit_and_is_negative_past_it():
    rows = plan([(1, 5, 6, False), (2, 5, 2, False), (3, 5, 6, False), (1, 0, 7, True)])
    assert progress().room(rows).tolist() == [1, 1, -1]


def test_resolving_moves_rows_to_where_they_begin_and_gives_void_ones_the_padding_slot():
    before = plan([(1, 5, 6, False), (2, 5, 2, False), (3, 5, 6, False), (1, 3, 7, True)])
    after = progress().resolve(before, int32(1, 0, -1))
    assert after.slots.tolist() == [1, 2, 0, 1]
    assert after.starts.tolist() == [8, 9, 0, 3]
    assert after.counts.tolist() == [2, 1, 1, 7]
    assert after.decoder_starts.tolist() == [2, 2, 0, 2]
    assert before.starts.tolist() == [5, 5, 5, 3] and before.slots.tolist() == [1, 2, 3, 1]


def test_rows_of_a_plan_without_prompts_become_void_too():
    after = progress().resolve(plan([(3, 5, 6, False), (2, 5, 2, False)]), int32(-1, 1))
    assert after.slots.tolist() == [0, 2] and after.starts.tolist() == [0, 9]
    assert after.counts.tolist() == [1, 2] and after.decoder_starts.tolist() == [0, 2]


def test_all_else_of_a_plan_stays():
    rows, moved = plan([(1, 5, 6, False), (2, 0, 7, True)]), {"slots", "starts", "counts", "decoder_starts"}
    others = [field.name for field in fields(StepPlan) if field.name not in moved]
    before = replace(rows, **{name: [name] for name in others if name not in ("is_prefill", "samples")})
    after = progress().resolve(before, int32(1))
    assert all(getattr(after, name) is getattr(before, name) for name in others)


def test_a_slot_goes_on_while_its_next_row_has_room_for_a_draft():
    slots = progress()
    assert slots.goes_on(int32(0, 1, 2, 3), int32(5, 8, 9, 10)).tolist() == [False, True, True, True]
    slots.starts[1:] = [9, 10, 11]
    assert slots.goes_on(int32(1, 2, 3), slots.starts[1:]).tolist() == [False] * 3
    whole = plan([(slot, 5, 6, False) for slot in (1, 2, 3)])
    assert slots.room(whole).tolist() == [0, 0, 0]
