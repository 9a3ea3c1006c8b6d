"""Sizes of launches. Triton's own functions of these names serve kernels too, and cost ten times as much.

A prompt's step computes some sixty of them a layer while the device waits for its launches.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()
