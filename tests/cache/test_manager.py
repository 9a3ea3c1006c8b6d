import random

import numpy as np
import pytest

from deepinfer.cache.manager import CacheManager


def manager(num_blocks=10, num_slots=3, block_tokens=4, max_model_len=24):
    return CacheManager(num_blocks, num_slots, block_tokens, max_model_len)


def apply(changes, table):
    slots, columns, blocks = changes
    assert len({*zip(slots.tolist(), columns.tolist(), strict=True)}) == len(slots)
    table[slots, columns] = blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (24, 6)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert manager().blocks_for(tokens) == blocks


def test_admit_gives_a_slot_with_blocks_for_all_its_tokens():
    cache = manager()
    slot = cache.admit(9)
    assert slot == 1
    assert cache.num_slot_blocks.tolist() == [0, 3, 0, 0]
    assert cache.block_table[slot].tolist() == [1, 2, 3, 0, 0, 0]
    assert (cache.num_free_blocks, cache.num_held_blocks, cache.num_free_slots) == (7, 3, 2)


def test_admit_returns_none_and_takes_nothing_when_blocks_are_short():
    cache = manager(num_blocks=4)
    cache.admit(9)
    assert not cache.can_admit(5) and cache.admit(5) is None
    assert (cache.num_free_blocks, cache.num_free_slots) == (1, 2)
    assert cache.can_admit(4)


def test_admit_returns_none_when_all_slots_are_held():
    cache = manager(num_slots=1)
    cache.admit(1)
    assert not cache.can_admit(1) and cache.admit(1) is None


def test_can_admit_leaves_the_reserve_untouched():
    cache = manager(num_blocks=4)
    assert cache.can_admit(8, reserve_blocks=2)
    assert not cache.can_admit(8, reserve_blocks=3)


def test_grow_adds_only_the_missing_blocks():
    cache = manager()
    slot = cache.admit(4)
    assert cache.grow(slot, 3) and cache.num_slot_blocks[slot] == 1
    assert cache.grow(slot, 5) and cache.block_table[slot].tolist() == [1, 2, 0, 0, 0, 0]


def test_grow_returns_false_and_takes_nothing_when_full():
    cache = manager(num_blocks=3)
    slot = cache.admit(4)
    cache.admit(4)
    assert not cache.grow(slot, 12)
    assert cache.num_free_blocks == 1
    assert cache.grow(slot, 8)


def test_needs_blocks_tells_which_slots_are_full():
    cache = manager()
    slots = np.array([cache.admit(4), cache.admit(5)], dtype=np.int32)
    assert cache.needs_blocks(slots, np.array([5, 8], dtype=np.int32)).tolist() == [True, False]


def test_release_blocks_keeps_the_slot():
    cache = manager()
    slot = cache.admit(8)
    cache.release_blocks(slot)
    assert (cache.num_held_blocks, cache.num_free_slots) == (0, 2)
    cache.check()
    cache.release(slot)
    assert cache.num_free_slots == 3


def test_changes_carry_new_blocks_once():
    cache = manager()
    slot = cache.admit(5)
    slots, columns, blocks = cache.take_changes()
    assert (slots.tolist(), columns.tolist(), blocks.tolist()) == ([slot, slot], [0, 1], [1, 2])
    assert {array.dtype for array in (slots, columns, blocks)} == {np.dtype(np.int32)}
    assert [len(array) for array in cache.take_changes()] == [0, 0, 0]


def test_changes_zero_the_entries_of_a_released_slot():
    cache = manager()
    slot = cache.admit(12)
    cache.take_changes()
    cache.release(slot)
    assert [array.tolist() for array in cache.take_changes()] == [[slot] * 3, [0, 1, 2], [0, 0, 0]]


def test_changes_of_a_slot_released_and_filled_again_hold_its_latest_blocks():
    cache = manager()
    slot = cache.admit(12)
    cache.take_changes()
    cache.release(slot)
    other = cache.admit(4)
    assert other == slot
    assert [array.tolist() for array in cache.take_changes()] == [[slot] * 3, [0, 1, 2], [1, 0, 0]]


def test_max_held_blocks_keeps_the_peak():
    cache = manager()
    slot = cache.admit(20)
    cache.release(slot)
    cache.admit(1)
    assert (cache.max_held_blocks, cache.num_held_blocks) == (5, 1)


@pytest.mark.parametrize("call", ["grow", "release", "release_blocks"])
def test_use_of_a_slot_that_is_not_held_is_caught(call):
    cache = manager()
    cache.admit(1)
    arguments = (2, 4) if call == "grow" else (2,)
    with pytest.raises(AssertionError, match="slot 2 .*not held"):
        getattr(cache, call)(*arguments)


def test_growth_past_the_longest_sequence_is_caught():
    cache = manager()
    with pytest.raises(AssertionError, match="25 tokens are too many for a slot of 6 blocks"):
        cache.grow(cache.admit(1), 25)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache: cache.block_table.__setitem__((1, 2), 9), "past a slot's blocks"),
        (lambda cache: cache.block_table.__setitem__((1, 1), 1), "not held or free exactly once"),
        (lambda cache: cache.block_table.__setitem__((2, 0), 1), "not held or free exactly once"),
        (lambda cache: cache.block_table.__setitem__((1, 0), 0), "padding block"),
        (lambda cache: cache.num_slot_blocks.__setitem__(2, 2), "held \\+ .* free blocks are not 10"),
        (lambda cache: cache._slots.free(2), "slot 2 is free but holds blocks"),
    ],
)
def test_check_catches_damage(damage, message):
    cache = manager()
    cache.admit(8)
    cache.admit(4)
    cache.check()
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()


@pytest.mark.parametrize(
    ("num_blocks", "num_slots", "seed"), [(1, 1, 0), (7, 3, 1), (40, 6, 2), (40, 20, 3), (64, 8, 4)]
)
def test_random_operations_keep_every_invariant(num_blocks, num_slots, seed):
    """20,000 operations each, 100,000 in all; a simple model of sets says what each must return."""
    choice = random.Random(seed)
    cache = manager(num_blocks, num_slots, block_tokens=4, max_model_len=48)
    device_table = np.zeros_like(cache.block_table)
    held: dict[int, int] = {}  # slot -> blocks
    for _ in range(20_000):
        operation = choice.random()
        tokens = choice.randint(1, 48)
        free = num_blocks - sum(held.values())
        if operation < 0.4:
            slot = cache.admit(tokens)
            fits = len(held) < num_slots and -(-tokens // 4) <= free
            assert (slot is not None) == fits
            if slot is not None:
                assert slot not in held and 1 <= slot <= num_slots
                held[slot] = -(-tokens // 4)
        elif operation < 0.7 and held:
            slot = choice.choice(list(held))
            wanted = max(held[slot], -(-tokens // 4))
            assert cache.grow(slot, tokens) == (wanted - held[slot] <= free)
            if wanted - held[slot] <= free:
                held[slot] = wanted
        elif operation < 0.9 and held:
            slot = choice.choice(list(held))
            cache.release(slot)
            del held[slot]
        elif operation < 0.95 and held:
            slot = choice.choice(list(held))
            cache.release_blocks(slot)
            held[slot] = 0
        else:
            apply(cache.take_changes(), device_table)
            assert (device_table == cache.block_table).all()
        cache.check()
        assert cache.num_held_blocks == sum(held.values())
    for slot in held:
        cache.release(slot)
    cache.check()
    assert (cache.num_free_blocks, cache.num_free_slots) == (num_blocks, num_slots)
