"""Keys of cache blocks: two blocks of one key hold the same entries.

What a block holds depends on all tokens up to its end, and on the images among them, whose positions
all carry one token id. So keys form a chain: each is a digest of the one before it, the block's tokens,
and the place and key of every image that has a position in the block. Prompts come from strangers,
so the digest is a cryptographic one, over an encoding that can be read in one way only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from deepinfer.images.messages import ImageSpan
from deepinfer.messages import Int32

KEY_BYTES = 32
# Told apart by `person`: a salt, which a caller chooses, never makes the key of a block.
SALT, BLOCK = b"salt", b"block"


def chain_start(salt: bytes = b"") -> bytes:
    """What the first key of a chain depends on; requests of different salts share no block."""
    return hashlib.blake2b(salt, digest_size=KEY_BYTES, person=SALT).digest()


def block_keys(
    token_ids: Int32, images: Sequence[ImageSpan], block_tokens: int, *, parent: bytes, start: int = 0
) -> Iterator[bytes]:
    """The keys of the full blocks from position `start` on, each worked out when it is asked for.

    token_ids: [n] int32, of positions 0 .. n - 1. images: in order; those of the whole prompt.
    start: a multiple of `block_tokens`. parent: key of the block before it, or `chain_start`.
    """
    assert start % block_tokens == 0, f"position {start} is not the start of a block of {block_tokens} tokens"
    assert len(parent) == KEY_BYTES, "a chain begins with a key"
    first = 0  # of the images, that may reach into this block
    for begin in range(start, len(token_ids) - block_tokens + 1, block_tokens):
        end = begin + block_tokens
        digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=BLOCK)
        digest.update(token_ids[begin:end].astype("<i4").tobytes())
        while first < len(images) and images[first].end <= begin:
            first += 1
        for place in range(first, len(images)):
            span = images[place]
            if span.start >= end:
                break
            digest.update((span.start - begin).to_bytes(8, "little", signed=True))
            digest.update(len(span.image.key).to_bytes(8, "little") + span.image.key)
        parent = digest.digest()
        yield parent
