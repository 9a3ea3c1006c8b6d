import numpy as np
import pytest

from deepinfer.speculate.verify import checked_drafts, count_tokens


def kept(drawn, drafts, usable=None):
    """Rows of drawn tokens; what each row keeps of them."""
    flat = np.array([token for row in drawn for token in row], dtype=np.int32)
    flags = np.ones(len(flat), dtype=np.bool_) if usable is None else np.array(usable)
    counts = np.array([len(row) for row in drawn], dtype=np.int32)
    places = np.concatenate([np.arange(count) for count in counts])
    checked = checked_drafts(np.array(drafts, dtype=np.int32), counts, places)
    return count_tokens(flat, flags, checked, counts.cumsum() - counts).tolist()


@pytest.mark.parametrize(
    ("drawn", "drafts", "expected"),
    [
        ([[5]], [[9, 9]], [1]),
        ([[5, 6, 7]], [[5, 6]], [3]),
        ([[5, 6, 7]], [[5, 9]], [2]),
        ([[5, 6, 7]], [[9, 6]], [1]),
        ([[5, 6], [7], [1, 2, 3]], [[5, 0], [7, 0], [1, 0]], [2, 1, 2]),
        ([[5, 6], [7]], [[5, 6], [7, 7]], [2, 1]),  # the second draft was not checked
    ],
)
def test_a_row_keeps_its_drafts_up_to_the_first_that_was_not_drawn_and_the_token_there(drawn, drafts, expected):
    assert kept(drawn, drafts) == expected


def test_a_line_without_a_token_ends_its_row_even_if_it_looks_like_the_draft():
    assert kept([[0, 6, 7], [5, 0, 8]], [[0, 6], [5, 0]], [False, True, True, True, False, True]) == [1, 2]


def test_against_a_loop_over_random_rows():
    random = np.random.default_rng(0)
    for _ in range(200):
        counts = random.integers(1, 6, 7)
        drafts, drawn = random.integers(0, 2, (7, 5)), [random.integers(0, 2, count).tolist() for count in counts]
        expected = []
        for row, own in zip(drawn, drafts, strict=True):
            count = 1
            while count < len(row) and row[count - 1] == own[count - 1]:
                count += 1
            expected.append(count)
        assert kept(drawn, drafts) == expected
