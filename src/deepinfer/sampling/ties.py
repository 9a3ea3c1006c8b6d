"""Choosing a number of largest values per row with one answer: equal values go to the lower id."""

from __future__ import annotations

from torch import Tensor


def keep_largest(values: Tensor, last: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` largest values of each row.

    values: [rows, ids] float32. count: [rows] int64, 1 <= count <= ids.
    last: [rows] the count-th largest value of the row; of the ids that have it the lower ones win.
    Returns [rows, ids] bool.
    """
    above = values > last[:, None]
    equal = values == last[:, None]
    open_places = count - above.sum(-1)
    return above | (equal & (equal.cumsum(-1) <= open_places[:, None]))


def largest_ids(values: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest values of each row, best first, equal values by lower id.

    values: [rows, ids] float32 without NaN, 0 <= count <= ids. Returns [rows, count] int64.
    """
    rows = values.shape[0]
    if count == 0 or rows == 0:
        return values.new_zeros((rows, count)).long()
    last = values.topk(count, dim=-1).values[:, -1]
    kept = keep_largest(values, last, last.new_full((rows,), count).long())
    ids = kept.nonzero()[:, 1].view(rows, count)  # ascending in each row
    order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
