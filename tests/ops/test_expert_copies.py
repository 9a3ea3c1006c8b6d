"""Copies of experts: their sizes, and who has room for them."""

import pytest

from deepinfer.ops.expert_copies import COPY_SHARE, copy_bytes


@pytest.mark.parametrize(
    ("num_experts", "hidden", "inner", "copied"),
    [
        (6, 5120, 2304, 6 * 5120 * (4608 + 2304)),
        (3, 96, 64, 3 * 256 * (256 + 256)),
        (2, 300, 200, 2 * 512 * (512 + 256)),
    ],
)
def test_copies_are_padded_to_tiles_and_kept_where_they_have_room(num_experts, hidden, inner, copied):
    room = round(copied / COPY_SHARE)
    assert [copy_bytes(num_experts, hidden, inner, card) for card in (room, room - 400, 0)] == [copied, 0, 0]


def test_experts_that_are_not_packed_are_not_copied():
    assert copy_bytes(512, 32, 32, 1 << 60) > 0 == copy_bytes(513, 32, 32, 1 << 60)
