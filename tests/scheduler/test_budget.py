import pytest

from deepinfer.scheduler.budget import StepBudget


def test_decode_rows_take_their_tokens_before_chunks():
    budget = StepBudget(max_step_tokens=10, max_chunk_tokens=10, max_prefill_tokens=10)
    budget.take_decode(7)
    assert budget.take_chunk(5) == 3
    assert budget.prefill_left == 0


def test_a_chunk_takes_no_more_than_it_wants_or_may():
    budget = StepBudget(max_step_tokens=100, max_chunk_tokens=8, max_prefill_tokens=100)
    assert [budget.take_chunk(5), budget.take_chunk(50)] == [5, 8]
    assert budget.prefill_left == 87


def test_prompts_together_take_no_more_than_their_share():
    budget = StepBudget(max_step_tokens=100, max_chunk_tokens=100, max_prefill_tokens=8)
    budget.take_decode(20)
    assert [budget.take_chunk(5), budget.take_chunk(50), budget.take_chunk(1)] == [5, 3, 0]


def test_an_image_may_exceed_the_share_of_prompts_and_uses_it_up():
    budget = StepBudget(max_step_tokens=100, max_chunk_tokens=100, max_prefill_tokens=8)
    assert budget.take_chunk(60, lambda count: 40) == 40
    assert budget.prefill_left == budget.take_chunk(5) == 0


def test_a_full_step_gives_no_chunk():
    budget = StepBudget(max_step_tokens=4, max_chunk_tokens=4, max_prefill_tokens=4)
    budget.take_decode(4)
    assert budget.take_chunk(1) == 0


def test_more_decode_rows_than_tokens_are_caught():
    with pytest.raises(AssertionError, match="5 tokens but the step 4"):
        StepBudget(4, 4, 4).take_decode(5)


def test_drafts_share_what_decode_rows_leave_and_half_of_it_when_prompts_wait():
    budget = StepBudget(20, 20, 20)
    assert budget.drafts_per_row(4, 5, is_shared=False) == 4
    assert budget.drafts_per_row(4, 5, is_shared=True) == 2
    assert budget.drafts_per_row(2, 5, is_shared=False) == 5
    assert budget.drafts_per_row(20, 5, is_shared=False) == 0
    assert budget.drafts_per_row(0, 5, is_shared=False) == budget.drafts_per_row(3, 0, is_shared=False) == 0
