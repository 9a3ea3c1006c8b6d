"""compress: pages, index keys and state against the reference, and the same bits however tokens are put together.

Products and norms are float32 sums in another order than the reference's. Where their last bit decides a
rounding, a code moves by one step; where it decides a scale, the codes of its block move with it. So bytes are
compared by how many are equal, and rows by how far the numbers in them lie apart.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from backends.cpu import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import CompressorWeights, RopeSpec
from ops import golden, world

HIDDEN = 48


@functools.cache
def weights_of(ratio: int, dim: int = 64, index_dim: int = 32, hidden: int = HIDDEN) -> CompressorWeights:
    return CompressorWeights(
        wkv=pair.random_weight(dim, hidden, seed=ratio),
        wgate=pair.random_weight(dim, hidden, seed=ratio + 10) if ratio > 1 else None,
        norm=pair.random_norm(dim, ratio),
        index_wk=pair.random_weight(index_dim, dim, seed=ratio + 20),
        index_norm=pair.random_norm(index_dim, ratio + 1),
        ratio=ratio,
        rope=RopeSpec(16, 10000.0),
    )


class Caches:
    """State, pages and index pages, poisoned but for padding."""

    def __init__(self, weights: CompressorWeights, slots: int, blocks: int, length: int | None = None):
        ratio, dim, index_dim = weights.ratio, weights.wkv.value.shape[0], weights.index_wk.value.shape[0]
        entries = world.BLOCK_TOKENS // ratio
        self.state = None
        if ratio > 1:
            self.state = world.poisoned(slots, length or ratio, 2, dim, dtype=torch.float32)
        self.pages = world.poisoned(blocks, entries, dim // 16 * 9)
        self.index_pages = world.poisoned(blocks, entries, index_dim // 32 * 17)

    def all(self) -> tuple[Tensor | None, Tensor, Tensor]:
        return self.state, self.pages, self.index_pages

    def bits(self) -> list[Tensor]:
        return [cache.view(torch.uint8) for cache in self.all() if cache is not None]


def vectors(lengths: dict[int, int], hidden: int = HIDDEN) -> dict[int, Tensor]:
    """Of numbers that bf16 holds, to which tiles round them."""
    random = torch.Generator().manual_seed(7)
    return {slot: torch.randn(length, hidden, generator=random).bfloat16().float() for slot, length in lengths.items()}


def run(ops, weights, caches: Caches, steps, x: dict[int, Tensor], tables) -> None:
    compressor = ops.prepare_compressor(weights)
    for stretches in steps:
        joined = [x[slot or 1][start : start + count] for slot, start, count in stretches]
        batch = world.make_batch(stretches, tables=tables)
        ops.compress(torch.cat(joined) if joined else torch.empty(0, HIDDEN), batch, compressor, *caches.all())


def assert_close(actual: Caches, expected: Caches) -> None:
    for mine, theirs, unpack in (
        (actual.pages, expected.pages, quant.unpack_compressed),
        (actual.index_pages, expected.index_pages, quant.unpack_index),
    ):
        is_written = (theirs != 0xFF).any(-1)
        assert torch.equal((mine != 0xFF).any(-1), is_written)
        assert (mine == theirs).float().mean() >= 0.998
        # one step of an fp4 code next to the largest number of its 16 or 32, or of their e4m3 scale
        assert golden.row_error(unpack(mine[is_written]), unpack(theirs[is_written])) <= 0.2
    if actual.state is not None:
        mine, theirs = actual.state.nan_to_num(), expected.state.nan_to_num()
        assert (mine - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 7, 150])
def test_caches_equal_the_reference_for_any_ratio_and_chunk(ratio, size):
    lengths = {1: 150, 2: 150}
    weights, tables, x = weights_of(ratio), world.shuffled_tables(lengths, seed=size), vectors(lengths)
    steps = [[(2, start, count), (0, start, count), (1, start, count)] for start, count in world.chunks(150, size)]
    found = []
    for ops in (pair.cpu(), pair.reference()):
        caches = Caches(weights, 3, world.num_blocks(tables), ratio + size % 3)
        run(ops, weights, caches, steps, x, tables)
        found.append(caches)
    assert_close(*found)
    assert all(not bits[0].any() for bits in found[0].bits())


@pytest.mark.parametrize("ratio", [1, 2])
def test_nano_shapes_equal_the_reference(ratio):
    weights, lengths = weights_of(ratio, 128, 32, 384), {1: 700}
    tables, x = world.shuffled_tables(lengths), vectors(lengths, 384)
    found = [Caches(weights, 2, world.num_blocks(tables)) for _ in range(2)]
    for ops, caches in zip((pair.cpu(), pair.reference()), found, strict=True):
        run(ops, weights, caches, [[(1, 0, 600)], [(1, 600, 99)], [(1, 699, 1)]], x, tables)
    assert_close(*found)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 31, 150])
def test_chunks_give_the_same_bits_as_one_pass(ratio, size, num_threads):
    weights, tables, x = weights_of(ratio), world.shuffled_tables({1: 150}), vectors({1: 150})
    whole, parts = (Caches(weights, 2, world.num_blocks(tables)) for _ in range(2))
    run(pair.cpu(), weights, whole, [[(1, 0, 150)]], x, tables)
    with pair.threads(num_threads):
        run(pair.cpu(), weights, parts, [[(1, *chunk)] for chunk in world.chunks(150, size)], x, tables)
    assert all(torch.equal(a, b) for a, b in zip(whole.bits(), parts.bits(), strict=True))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [2, 7, 32])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(size, num_threads):
    lengths = {slot: 40 + slot for slot in range(1, size + 1)}
    weights, tables, x = weights_of(2), world.shuffled_tables(lengths), vectors(lengths)
    first = [(slot, 0, lengths[slot] - 4) for slot in lengths]
    second = [(slot, lengths[slot] - 4, 1 + slot % 4) for slot in lengths]
    alone, together = (Caches(weights, size + 1, world.num_blocks(tables)) for _ in range(2))
    run(pair.cpu(), weights, alone, [[stretch] for stretch in first + second], x, tables)
    with pair.threads(num_threads):
        run(pair.cpu(), weights, together, [first, second], x, tables)
    assert all(torch.equal(a, b) for a, b in zip(alone.bits(), together.bits(), strict=True))


def test_no_tokens_and_open_groups_write_no_entry():
    weights, tables, x = weights_of(4), world.shuffled_tables({1: 20}), vectors({1: 20})
    caches = Caches(weights, 2, world.num_blocks(tables))
    before = [cache.clone() for cache in (caches.pages, caches.index_pages)]
    run(pair.cpu(), weights, caches, [[], [(1, 0, 0)], [(1, 0, 3)], [(1, 3, 0)], [(1, 4, 3)]], x, tables)
    assert all(torch.equal(a, b) for a, b in zip((caches.pages, caches.index_pages), before, strict=True))


def test_slots_and_blocks_that_do_not_exist_are_not_written():
    weights, x = weights_of(2), vectors({1: 20})
    for tables, slot in (({1: [10**6]}, 1), ({1: [-5]}, 1), ({}, 1), ({1: [1]}, 7)):
        caches = Caches(weights, 2, 3)
        before = [bits.clone() for bits in caches.bits()]
        moved = {slot: x[1]}
        run(pair.cpu(), weights, caches, [[(slot, 0, 20)]], moved, {slot: tables[1]} if tables else {})
        state, pages, index_pages = caches.bits()
        if slot == 7:
            assert torch.equal(state, before[0])
        else:
            assert torch.equal(pages, before[1])
            assert torch.equal(index_pages, before[2])


def test_spread_out_inputs_give_the_same_bits_and_spread_out_caches_are_refused():
    weights, tables, x = weights_of(2), world.shuffled_tables({1: 20}), vectors({1: 20})
    dense, spread = (Caches(weights, 2, world.num_blocks(tables)) for _ in range(2))
    run(pair.cpu(), weights, dense, [[(1, 0, 20)]], x, tables)
    run(pair.cpu(), weights, spread, [[(1, 0, 20)]], {1: pair.spread(x[1])}, tables)
    assert all(torch.equal(a, b) for a, b in zip(dense.bits(), spread.bits(), strict=True))
    spread.pages = pair.spread(spread.pages)
    with pytest.raises(ShapeError, match="compressed pages has strides"):
        run(pair.cpu(), weights, spread, [[(1, 0, 20)]], x, tables)


def test_caches_that_do_not_fit_are_refused():
    ops, tables = pair.cpu(), world.shuffled_tables({1: 20})
    weights, batch, x = weights_of(2), world.make_batch([(1, 0, 2)], tables=tables), torch.zeros(2, HIDDEN)
    compressor, (state, pages, index_pages) = ops.prepare_compressor(weights), Caches(weights, 2, 3).all()
    with pytest.raises(ShapeError, match="compressed pages has shape"):
        ops.compress(x, batch, compressor, state, pages[:, 1:], index_pages)
    with pytest.raises(ShapeError, match="needs its state ring"):
        ops.compress(x, batch, compressor, None, pages, index_pages)
    with pytest.raises(ShapeError, match="x has 3 rows"):
        ops.compress(torch.zeros(3, HIDDEN), batch, compressor, state, pages, index_pages)
    with pytest.raises(ShapeError, match="wgate only above ratio 1"):
        ops.prepare_compressor(CompressorWeights(**{**vars(weights), "wgate": None}))
