"""compress against the reference: packed rows, index keys and state, bit for bit."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.weights import CompressorWeights, NormWeights, RopeSpec, Weight
from ops import world

pytest.importorskip("triton", reason="triton is not installed")
HIDDEN, DIM, INDEX = 48, 64, 32


def bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_of(ratio: int) -> CompressorWeights:
    norms = [NormWeights(Weight(1 + 0.2 * bf16(width, seed=width)), 1e-6) for width in (DIM, INDEX)]
    gate = Weight(bf16(DIM, HIDDEN, seed=2) * 0.2) if ratio > 1 else None
    rope = RopeSpec(16, 10000.0)
    return CompressorWeights(
        Weight(bf16(DIM, HIDDEN, seed=1) * 0.2),
        gate,
        norms[0],
        Weight(bf16(INDEX, DIM, seed=3) * 0.2),
        norms[1],
        ratio,
        rope,
    )


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_caches_hold_the_bytes_of_the_reference(ratio):
    tables = world.shuffled_tables({1: 130, 2: 9})
    entries, blocks = world.BLOCK_TOKENS // ratio, world.num_blocks(tables)
    state = world.poisoned(3, ratio + 1, 2, DIM, dtype=torch.float32) if ratio > 1 else None
    caches = [state, world.poisoned(blocks, entries, DIM // 16 * 9), world.poisoned(blocks, entries, INDEX // 32 * 17)]
    copies = [None if cache is None else cache.clone() for cache in caches]
    there = [None if cache is None else pair.placed(cache.clone()) for cache in caches]
    ours, theirs = pair.hopper(), pair.reference()
    prepared = ours.prepare_compressor(pair.placed(weights_of(ratio))), theirs.prepare_compressor(weights_of(ratio))
    for number, stretches in enumerate(
        ([(1, 0, 7), (2, 0, 4)], [(1, 7, 1), (2, 4, 5), (0, 0, 2)], [(1, 8, 2), (2, 9, 0)])
    ):
        batch = world.make_batch(stretches, tables=tables)
        x = bf16(batch.num_tokens, HIDDEN, seed=number)
        theirs.compress(x.float(), batch, prepared[1], *copies)
        ours.compress(pair.narrow(x), pair.placed(batch), prepared[0], *there)
    for name, actual, expected in zip(("state", "pages", "index pages"), there, copies, strict=True):
        if expected is None:
            continue
        actual = actual.cpu()
        if expected.is_floating_point():
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:  # float32 sums in another order: a value may round to bf16, and so to fp4, the other way
            assert float((actual == expected).float().mean()) >= 0.9999, name


def test_no_tokens_write_nothing():
    tables = world.shuffled_tables({1: 9})
    pages = pair.placed(world.poisoned(3, 60, DIM // 16 * 9))
    index, state = (
        pair.placed(world.poisoned(3, 60, 17)),
        pair.placed(world.poisoned(2, 2, 2, DIM, dtype=torch.float32)),
    )
    before = pages.clone()
    ops = pair.hopper()
    batch = pair.placed(world.make_batch([(1, 3, 0)], tables=tables))
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=pair.DEVICE)
    ops.compress(x, batch, ops.prepare_compressor(pair.placed(weights_of(2))), state, pages, index)
    assert torch.equal(pages, before)
