"""Which routed experts a Hopper card keeps twice: as they are stored, and as e4m3 for products of many tokens."""

from __future__ import annotations

COPY_SHARE = 1 / 400  # of a card's memory, that a layer's copies may take: a tenth for 40 layers
MAX_EXPERTS, TILE = 512, 256  # packed together at most; to which rows and columns of packed matrices are padded


def copy_bytes(num_experts: int, hidden: int, inner: int, card_bytes: int) -> int:
    """Bytes of a layer's copies, w1 above w3 and w2 of each expert; 0 where a card of this memory keeps none."""
    wide, rows, columns = (-(-size // TILE) * TILE for size in (hidden, 2 * inner, inner))
    copied = num_experts * wide * (rows + columns)
    return copied if num_experts <= MAX_EXPERTS and copied <= COPY_SHARE * card_bytes else 0
