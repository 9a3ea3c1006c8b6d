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


def two_powers_of_2(n: int) -> tuple[int, int]:
    """The largest power of two up to n, and the smallest for the rest, or 0: two tiles waste less than one."""
    first = 1 << (n.bit_length() - 1)
    return first, next_power_of_2(n - first) if n > first else 0
