"""What ops work out once for a batch."""

from __future__ import annotations

import gc
import weakref

import torch

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import attention


def make_batch() -> TokenBatch:
    one = torch.zeros(1, dtype=torch.int32)
    return TokenBatch(one, one, torch.tensor([0, 1]), one, one, one.view(1, 1), one, block_tokens=4, max_position=0)


def test_the_latest_value_is_kept_with_what_it_rests_on_and_no_earlier_one():
    batch, made = make_batch(), []

    def latest(of: object, key: int = 0, name: str = "a") -> int:
        return batch.latest(name, of, key, lambda: made.append(len(made)) or made[-1])

    first, second = [1], [1]  # equal, but not the same
    assert [latest(first), latest(first), latest(first, 1), latest(second, 1), latest(first, 1)] == [0, 0, 1, 2, 3]
    assert [latest(None, name="b"), latest(first, 1), latest(None, name="b")] == [4, 3, 4]


def test_places_of_entries_go_with_the_selection_after_them():
    batch, pages = make_batch(), torch.zeros(1, 4, 36, dtype=torch.uint8)
    selections = [torch.tensor([[0, -1]], dtype=torch.int32) for _ in range(3)]
    seen = [weakref.ref(entries) for entries in selections]
    for entries in selections:
        for _ in range(2):
            assert attention._entry_keys(batch, pages, entries, 0, 1)[1].tolist() == [[False, True]]
    del selections, entries
    gc.collect()
    assert [reference() is None for reference in seen] == [True, True, False]
