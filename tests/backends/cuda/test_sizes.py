"""Sizes of launches are those that Triton computes."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
sizes = pytest.importorskip("deepinfer.backends.cuda.hopper.sizes", reason="triton is not installed")


def test_sizes_are_those_of_triton():
    for n in (*range(1, 70), 127, 128, 129, 4096, 65_537):
        assert sizes.next_power_of_2(n) == triton.next_power_of_2(n)
        assert [sizes.cdiv(n, b) for b in (1, 3, 64)] == [triton.cdiv(n, b) for b in (1, 3, 64)]


def test_two_tiles_hold_what_there_is():
    assert [sizes.two_powers_of_2(n) for n in (1, 2, 3, 72, 160, 128, 7)] == [
        (1, 0), (2, 0), (2, 1), (64, 8), (128, 32), (128, 0), (4, 4)
    ]  # fmt: skip
