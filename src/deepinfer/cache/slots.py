"""Which slots are free. Slot ids are 1 .. num_slots; 0 is the padding slot."""

from __future__ import annotations


class SlotManager:
    """Hands out slots, the fixed-size device state of running requests."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack = list(range(num_slots, 0, -1))  # the last goes first
        self._is_held = bytearray(num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._stack)

    def allocate(self) -> int | None:
        """A slot, or None when all are held."""
        if not self._stack:
            return None
        slot = self._stack.pop()
        self._is_held[slot] = True
        return slot

    def free(self, slot: int) -> None:
        """Take back a held slot."""
        assert self.is_held(slot), f"slot {slot} is freed but not held"
        self._is_held[slot] = False
        self._stack.append(slot)

    def is_held(self, slot: int) -> bool:
        return bool(self._is_held[slot])

    def check(self) -> None:
        """Assert that every slot is either held or free, once."""
        free = set(self._stack)
        assert len(free) == len(self._stack), f"a slot is free twice: {sorted(self._stack)}"
        held = {slot for slot, is_held in enumerate(self._is_held) if is_held}
        assert free | held == set(range(1, self.num_slots + 1)), f"free {free} and held {held} slots are not all slots"
        assert not free & held, f"slots {free & held} are both held and free"
