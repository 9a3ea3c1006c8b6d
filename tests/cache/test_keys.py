"""Keys of blocks: equal exactly where tokens and images are, up to the end of the block."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from deepinfer.cache.keys import KEY_BYTES, block_keys, chain_start
from deepinfer.images.messages import ImageInput, ImageSpan

TOKEN, BLOCK = 9, 4
Part = int | ImageInput


def image(number: int, num_tokens: int = 3) -> ImageInput:
    return ImageInput(bytes([number % 256, num_tokens % 256]) * 8, np.zeros((1, 1, 3), np.uint8), num_tokens, 1)


def prompt(parts: list[Part]) -> tuple[np.ndarray, list[ImageSpan]]:
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, ImageInput):
            spans.append(ImageSpan(len(ids), part))
            ids += [TOKEN] * part.num_tokens
        else:
            ids.append(part)
    return np.array(ids, np.int32), spans


def keys(parts: list[Part], salt: bytes = b"") -> list[bytes]:
    return list(block_keys(*prompt(parts), BLOCK, parent=chain_start(salt)))


def num_shared(a: list[bytes], b: list[bytes]) -> int:
    """Blocks that are equal; those behind the first other one all differ."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    shared = same.index(False) if False in same else len(same)
    assert not any(same[shared:])
    return shared


@pytest.mark.parametrize("place", range(13))
def test_images_of_one_size_share_keys_up_to_the_block_where_they_begin(place: int) -> None:
    """The place goes over every position of a block, so an image may also reach into the next one."""
    one, other = ([*range(100, 100 + place), image(n), *range(200, 220)] for n in (1, 2))
    assert num_shared(keys(one), keys(other)) == place // BLOCK
    assert keys(one) == keys([*one]) and len(keys(one)) == len(prompt(one)[0]) // BLOCK


def test_an_image_counts_in_every_block_that_holds_a_part_of_it() -> None:
    """Also with equal parents: the chain alone does not carry it."""
    parent, parts = chain_start(), [[1, 2, image(n, 10), 3, 4, 5, 6] for n in (1, 2)]
    for start in (0, 4, 8):
        a, b = (next(block_keys(*prompt(part), BLOCK, parent=parent, start=start)) for part in parts)
        assert a != b
    a, b = (next(block_keys(*prompt(part), BLOCK, parent=parent, start=12)) for part in parts)
    assert a == b


def test_where_an_image_begins_counts_though_its_tokens_are_alike() -> None:
    """Runs of one token id: cut in other places, in another order, or by no image at all."""
    runs = [
        [image(1, 3), image(2, 5)], [image(2, 5), image(1, 3)], [image(1, 5), image(2, 3)], [image(1, 8)],
        [image(1, 4), image(1, 4)], [TOKEN] * 8, [TOKEN, image(1, 7)], [image(1, 7), TOKEN],
    ]  # fmt: skip
    found = [keys(run) for run in runs]
    assert all(len(one) == 2 for one in found)
    for number, one in enumerate(found):
        for other in found[:number]:
            assert num_shared(one, other) <= 1 and one[1] != other[1]


def test_a_salt_parts_all_keys_and_is_no_key_of_a_block() -> None:
    parts: list[Part] = [*range(12)]
    assert num_shared(keys(parts), keys(parts, b"mine")) == 0
    assert keys(parts, b"mine") == keys(parts, b"mine")
    forged = chain_start() + np.arange(4, dtype="<i4").tobytes()  # what the first block is a digest of
    assert chain_start(forged) != keys(parts)[0]
    assert {len(key) for key in [chain_start(), *keys(parts)]} == {KEY_BYTES}


def test_keys_go_on_from_a_block_and_are_none_for_a_part_of_one() -> None:
    ids, spans = prompt([1, 2, 3, image(1, 6), 4, 5, image(2, 4), 6, 7])
    whole = list(block_keys(ids, spans, BLOCK, parent=chain_start()))
    assert len(whole) == len(ids) // BLOCK == 4
    for number in range(1, 4):
        rest = block_keys(ids, spans, BLOCK, parent=whole[number - 1], start=number * BLOCK)
        assert list(rest) == whole[number:]
    assert list(block_keys(ids[:3], [], BLOCK, parent=chain_start())) == []
    with pytest.raises(AssertionError, match="not the start of a block"):
        next(block_keys(ids, spans, BLOCK, parent=chain_start(), start=3))


def test_random_prompts_share_keys_exactly_as_far_as_they_are_the_same() -> None:
    draw, num_cases = random.Random(5), [0] * 5
    for _ in range(3000):
        parts: list[Part] = [
            image(draw.randrange(3), draw.randint(1, 7)) if draw.random() < 0.3 else draw.choice([TOKEN, 1, 2])
            for _ in range(draw.randint(4, 12))
        ]
        other = list(parts)
        changed = draw.randrange(len(parts))
        other[changed] = (
            image(draw.randrange(3), draw.randint(1, 7)) if draw.random() < 0.5 else draw.choice([TOKEN, 1])
        )
        (a, a_spans), (b, b_spans) = prompt(parts), prompt(other)
        expected = 0
        for end in range(BLOCK, min(len(a), len(b)) + 1, BLOCK):
            inside = [[(s.start, s.image.key) for s in spans if s.start < end] for spans in (a_spans, b_spans)]
            if a[:end].tolist() != b[:end].tolist() or inside[0] != inside[1]:
                break
            expected += 1
        assert num_shared(keys(parts), keys(other)) == expected
        num_cases[min(expected, 4)] += 1
    assert min(num_cases) > 50


def test_keys_of_a_million_tokens_and_a_thousand_images_take_no_time() -> None:
    ids, spans = prompt([part for number in range(1000) for part in (number, image(number, 999))])
    started = time.thread_time()
    assert len(list(block_keys(ids, spans, 128, parent=chain_start()))) == 1_000_000 // 128
    assert time.thread_time() - started < 2.0  # 0.03 s alone; the square of their number would be seconds
