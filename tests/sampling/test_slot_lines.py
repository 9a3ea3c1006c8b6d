import numpy as np
import pytest
import torch

from deepinfer.sampling.slot_lines import SlotLines

CPU = torch.device("cpu")


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_no_memory_is_taken_before_a_slot_asks():
    lines = SlotLines(513, 129_280, torch.int32, CPU)
    assert lines.tensor.numel() == 0
    assert lines.holders(slots(1, 2, 3)).tolist() == []
    lines.take(400)
    assert lines.tensor.shape == (1, 129_280)


def test_lines_keep_their_content_while_the_tensor_grows():
    lines = SlotLines(6, 3, torch.int32, CPU)
    for slot in (5, 1, 4, 2, 3, 0):
        lines.take(slot)[:] = slot
    assert lines.tensor.shape == (6, 3), "one line a slot is the most"
    assert lines.tensor[lines.numbers(slots(0, 1, 2, 3, 4, 5)), 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_released_line_serves_the_next_slot_zeroed():
    lines = SlotLines(4, 2, torch.float32, CPU)
    lines.take(1)[:] = 7.0
    lines.release(1)
    lines.release(1)
    assert lines.holders(slots(1)).tolist() == []
    assert lines.take(3).tolist() == [0.0, 0.0]
    assert len(lines.tensor) == 1


def test_taking_again_zeroes_the_slot_s_own_line():
    lines = SlotLines(4, 2, torch.int32, CPU)
    lines.take(1)[:] = 7
    other = lines.take(2)
    other[:] = 8
    assert lines.take(1).tolist() == [0, 0]
    assert lines.tensor[lines.numbers(slots(2))].tolist() == [[8, 8]]


@pytest.mark.parametrize("seed", range(3))
def test_random_takes_and_releases_never_share_a_line(seed):
    draw, lines, held = np.random.default_rng(seed), SlotLines(9, 1, torch.int64, CPU), {}
    for number in range(300):
        slot = int(draw.integers(9))
        if draw.random() < 0.5:
            lines.take(slot)[:] = held[slot] = number
        else:
            lines.release(slot)
            held.pop(slot, None)
        every = slots(*range(9))
        assert lines.holders(every).tolist() == sorted(held)
        assert lines.tensor[lines.numbers(every[sorted(held)]), 0].tolist() == [held[slot] for slot in sorted(held)]
