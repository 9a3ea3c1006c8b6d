import pytest

from deepinfer.cache.slots import SlotManager


def test_allocate_hands_out_every_slot_but_the_padding_slot_once():
    slots = SlotManager(3)
    assert [slots.allocate() for _ in range(4)] == [1, 2, 3, None]
    assert slots.num_free == 0


def test_a_freed_slot_is_handed_out_again():
    slots = SlotManager(3)
    slots.allocate()
    slots.allocate()
    slots.free(1)
    assert not slots.is_held(1)
    assert slots.allocate() == 1
    slots.check()


@pytest.mark.parametrize("slot", [0, 2])
def test_free_of_a_slot_that_is_not_held_is_caught(slot):
    slots = SlotManager(2)
    slots.allocate()
    with pytest.raises(AssertionError, match=f"slot {slot} is freed but not held"):
        slots.free(slot)
