import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.sampling.ties import keep_largest, largest_ids


def brute_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@settings(max_examples=60)
@given(st.lists(st.sampled_from([-float("inf"), -2.0, 0.0, 1.0, 1.5]), min_size=1, max_size=12), st.data())
def test_the_lower_of_equal_ids_wins(row, data):
    count = data.draw(st.integers(1, len(row)))
    values = torch.tensor([row])
    expected = brute_order(row)[:count]
    assert largest_ids(values, count).tolist() == [expected]
    last = values[:, expected[-1]]
    kept = keep_largest(values, last, torch.tensor([count]))
    assert kept.nonzero()[:, 1].tolist() == sorted(expected)


def test_rows_may_ask_for_different_counts():
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    kept = keep_largest(values, torch.tensor([3.0, 0.0]), torch.tensor([1, 3]))
    assert kept.tolist() == [[False, True, False, False], [True, True, True, False]]


def test_no_rows_and_no_count_give_empty_ids():
    assert largest_ids(torch.zeros(0, 5), 3).shape == (0, 3)
    assert largest_ids(torch.zeros(2, 5), 0).shape == (2, 0)
