import numpy as np
import pytest

from deepinfer.cache.blocks import BlockManager


def test_allocate_hands_out_every_block_but_the_padding_block_once():
    blocks = BlockManager(7)
    taken = np.concatenate([blocks.allocate(3), blocks.allocate(4)])
    assert sorted(taken.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert taken.dtype == np.int32
    assert blocks.num_free == 0


def test_allocate_returns_none_and_takes_nothing_when_too_few_are_free():
    blocks = BlockManager(4)
    blocks.allocate(3)
    assert blocks.allocate(2) is None
    assert blocks.num_free == 1
    assert blocks.allocate(1).tolist() == [4]


def test_freed_blocks_are_handed_out_again():
    blocks = BlockManager(3)
    taken = blocks.allocate(3)
    blocks.free(taken[1:2])
    assert blocks.num_free == 1
    assert blocks.allocate(1).tolist() == [2]
    blocks.check(taken)


def test_allocated_ids_stay_as_they_are_when_blocks_come_and_go():
    blocks = BlockManager(4)
    first = blocks.allocate(2)
    blocks.free(blocks.allocate(2))
    assert first.tolist() == [1, 2]


def test_allocate_of_none_gives_an_empty_array():
    assert BlockManager(2).allocate(0).tolist() == []


@pytest.mark.parametrize("freed", [[2], [0], [1, 3]])
def test_free_of_a_block_that_is_not_held_is_caught(freed):
    blocks = BlockManager(3)
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="freed but not held"):
        blocks.free(np.array(freed, dtype=np.int32))


def test_free_of_a_block_twice_in_one_call_is_caught():
    blocks = BlockManager(3)
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="4 blocks are free but only 3 exist"):
        blocks.free(np.array([1, 1], dtype=np.int32))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1], "1 held \\+ 1 free blocks are not 3"),
        ([1, 1], "blocks \\[1 2\\] are not held or free exactly once"),
        ([1, 0], "padding block"),
        ([1, 4], "block 4 does not exist"),
    ],
)
def test_check_catches_holders_that_do_not_add_up(held, message):
    blocks = BlockManager(3)
    blocks.allocate(2)
    blocks.check(np.array([2, 1], dtype=np.int32))
    with pytest.raises(AssertionError, match=message):
        blocks.check(np.array(held, dtype=np.int32))
