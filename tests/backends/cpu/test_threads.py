"""Helpers of the native library: any number of them, from any number of callers."""

from __future__ import annotations

import os
import threading

import torch

from backends.cpu import pair
from backends.cpu.test_matrix import matrix, vectors
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import multiply, prepare_matrix


def test_callers_at_the_same_time_get_their_own_results():
    packed = prepare_matrix(matrix("e4m3", 256, 384))
    xs = [vectors(5, 384) * (number + 1) for number in range(4)]
    expected = [multiply(x, packed) for x in xs]
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            if not torch.equal(multiply(xs[number], packed), expected[number]):
                wrong.append(number)

    with pair.threads(3):
        callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


def test_the_number_can_change_at_any_time():
    packed, x = prepare_matrix(matrix("bf16", 256, 64)), vectors(3, 64)
    expected = multiply(x, packed)
    try:
        for count in (2, 1, 4, 3, 1, 2):
            native().set_num_threads(count)
            for _ in range(20):
                assert torch.equal(multiply(x, packed), expected)
    finally:
        native().set_num_threads(1)


def test_a_forked_process_works_without_the_helpers():
    packed, x = prepare_matrix(matrix("bf16", 256, 64)), vectors(3, 64)
    with pair.threads(2):
        expected = multiply(x, packed)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(multiply(x, packed), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
