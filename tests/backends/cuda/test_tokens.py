"""Drafts are checked on the device as on the host, by kernel and by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.cuda import pair
from backends.cuda.pair import DEVICE
from deepinfer.errors import ShapeError
from deepinfer.speculate.verify import checked_drafts, count_tokens
from ops import world

SLOTS = [3, 0, 1, 6, 2, 4, 7]


@pytest.mark.parametrize("name", ["reference", "hopper"])
@pytest.mark.parametrize("most", [0, 1, 3, 7, 8, 9, 20])
def test_rows_keep_what_the_host_would_and_the_ring_holds_the_newest(name: str, most: int) -> None:
    random = np.random.default_rng(most)
    counts, starts = random.integers(1, most + 2, len(SLOTS)), random.integers(0, 1000, len(SLOTS))
    drafts = random.integers(0, 2, (len(SLOTS), max(most, 1))).astype(np.int32)
    drawn, usable = random.integers(0, 2, counts.sum()), random.random(counts.sum()) < 0.9
    offsets, places = np.cumsum(counts) - counts, np.concatenate([np.arange(count) for count in counts])
    kept = count_tokens(drawn.astype(np.int32), usable, checked_drafts(drafts, counts, places), offsets)
    last, length = offsets + kept - 1, most + 9
    ring = torch.full((9, length + 2), -1, dtype=torch.int32)[:, 1:-1]  # a view into slots
    for slot, start, own in zip(SLOTS, starts, drafts, strict=True):
        ring[slot, (start + 1 + np.arange(len(own))) % length] = torch.from_numpy(own)
    expected = ring.clone()
    for slot, position, line in zip(SLOTS, starts + kept, last, strict=True):
        if slot:
            expected[slot, position % length] = int(drawn[line])
    padding = [(0, 0, 5), (0, 0, 0)]  # what a captured step has too many of: its tokens have no lines
    batch = pair.placed(world.make_batch([*zip(SLOTS, starts.tolist(), counts.tolist(), strict=True), *padding]))
    ring = ring._base.to(DEVICE)[:, 1:-1]
    ops = pair.hopper() if name == "hopper" else pair.reference()
    columns = torch.full((4, 32), -1, dtype=torch.int32, device=DEVICE)
    tokens, flags = torch.from_numpy(drawn).to(DEVICE), torch.from_numpy(usable).to(DEVICE)
    ops.verify(tokens, flags, batch, ring, columns[1:3, : len(SLOTS)])
    assert columns[1:3, : len(SLOTS)].tolist() == [drawn[last].tolist(), (starts + kept).tolist()]
    assert (columns[[0, 3]] == -1).all() and (columns[:, len(SLOTS) :] == -1).all()
    assert torch.equal(ring.cpu(), expected) and (ring._base[:, [0, -1]] == -1).all()


def test_no_rows_are_no_work_and_tokens_of_another_type_are_refused() -> None:
    ring, nothing = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE), torch.zeros(0, device=DEVICE)
    batch, usable, newest = pair.placed(world.make_batch([])), nothing.bool(), ring[:, :0]
    for ops in (pair.hopper(), pair.reference()):
        ops.verify(nothing.long(), usable, batch, ring, newest)
    with pytest.raises(ShapeError, match="token_ids is torch.int32"):
        pair.hopper().verify(nothing.int(), usable, batch, ring, newest)
