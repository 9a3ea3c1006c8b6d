import numpy as np

from deepinfer.messages import StepPlan
from deepinfer.runner.lines import Lines


def int32(*values):
    return np.array(values, dtype=np.int32)


def plan(rows):
    """Rows of slot, start, count, is_prefill, samples."""
    slots, starts, counts, is_prefill, samples = (np.array(column) for column in zip(*rows, strict=True))
    nothing, flags = int32(), np.zeros(len(rows), dtype=np.bool_)
    return StepPlan(
        1, int32(*slots), int32(*starts), int32(*counts), int32(*starts) * 0, is_prefill, samples, flags,
        int32(*[0] * counts[is_prefill].sum()), nothing, nothing, nothing,
    )  # fmt: skip


def test_a_decode_row_draws_after_each_of_its_tokens_and_a_prefill_row_after_its_last():
    lines = Lines.of(
        plan([(4, 9, 3, False, True), (2, 5, 1, False, True), (1, 0, 7, True, False), (3, 2, 6, True, True)])
    )
    assert lines.slots.tolist() == [4, 2, 3] and lines.counts.tolist() == [3, 1, 1]
    assert lines.line_slots.tolist() == [4, 4, 4, 2, 3]
    assert lines.line_positions.tolist() == [10, 11, 12, 6, 8]
    assert lines.line_places.tolist() == [0, 1, 2, 0, 0]
    assert lines.offsets.tolist() == [0, 3, 4] and lines.num_lines == 5 and not lines.is_single
    assert lines.kept(int32(2, 1, 0)).tolist() == [True, True, False, True, False]


def test_rows_of_one_line_are_themselves():
    lines = Lines.of(plan([(4, 9, 1, False, True), (3, 2, 6, True, True)]))
    assert lines.is_single and lines.line_slots is lines.slots
    assert lines.line_positions.tolist() == [10, 8]


def test_the_rows_of_a_plain_step_have_one_line_each():
    step = plan([(4, 9, 1, False, True), (3, 2, 1, False, True)])
    step.is_plain = True
    lines = Lines.of(step)
    assert lines.is_single and lines.num_lines == 2 and lines.line_slots.tolist() == [4, 3]
    assert lines.line_positions.tolist() == lines.firsts.tolist() == [10, 3] and lines.counts.tolist() == [1, 1]
