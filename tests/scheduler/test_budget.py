import pytest

from deepinfer.scheduler.budget import StepBudget


def test_decode_rows_take_their_tokens_before_chunks():
    budget = StepBudget(max_step_tokens=10, max_chunk_tokens=10)
    budget.take_decode(7)
    assert budget.take_chunk(5) == 3
    assert budget.left == 0


def test_a_chunk_takes_no_more_than_it_wants_or_may():
    budget = StepBudget(max_step_tokens=100, max_chunk_tokens=8)
    assert [budget.take_chunk(5), budget.take_chunk(50)] == [5, 8]
    assert budget.left == 87


def test_a_full_step_gives_no_chunk():
    budget = StepBudget(max_step_tokens=4, max_chunk_tokens=4)
    budget.take_decode(4)
    assert budget.take_chunk(1) == 0


def test_more_decode_rows_than_tokens_are_caught():
    with pytest.raises(AssertionError, match="5 tokens but the step 4"):
        StepBudget(4, 4).take_decode(5)
