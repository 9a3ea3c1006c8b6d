"""compress: pages, index keys and state."""

from __future__ import annotations

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import CompressorWeights, NormWeights, RopeSpec, Weight
from ops import golden, world

SOURCES = (1, 4)


def caches(ratio: int, slots: int, blocks: int, dim: int = 64, index_dim: int = 64, length: int | None = None):
    entries = world.BLOCK_TOKENS // ratio
    state = world.poisoned(slots, length or ratio, 2, dim, dtype=torch.float32) if ratio > 1 else None
    pages = world.poisoned(blocks, entries, dim // 16 * 9)
    return state, pages, world.poisoned(blocks, entries, index_dim // 32 * 17)


def entries_of(pages: torch.Tensor, blocks: list[int], count: int, unpack) -> torch.Tensor:
    return unpack(pages[blocks].flatten(0, 1)[:count])


def weights_for(ratio: int, seed: int) -> CompressorWeights:
    """Random weights of width 16 -> 32, index width 32."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Weight:
        return Weight(torch.randn(*shape, generator=random).to(torch.bfloat16))

    return CompressorWeights(
        wkv=normal(32, 16),
        wgate=normal(32, 16) if ratio > 1 else None,
        norm=NormWeights(normal(32), 1e-6),
        index_wk=normal(32, 32),
        index_norm=NormWeights(normal(32), 1e-6),
        ratio=ratio,
        rope=RopeSpec(8, 100.0),
    )


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
@pytest.mark.parametrize("layer", SOURCES)
def test_entries_and_index_keys_equal_the_oracle(layer, length, precision):
    trace, ops, tables = golden.trace(length, precision), golden.ops(precision), world.shuffled_tables({1: length})
    ratio, name = golden.ratio(layer), f"layers.{layer}.attn"
    state, pages, index_pages = caches(ratio, 2, world.num_blocks(tables))
    x = trace[f"{name}.input"]
    batch = world.make_batch([(1, 0, length)], tables=tables)
    ops.compress(x, batch, ops.prepare_compressor(golden.compressor(layer)), state, pages, index_pages)
    for cache, unpack, key in (
        (pages, quant.unpack_compressed, f"{name}.compressed_kv"),
        (index_pages, quant.unpack_index, f"{name}.indexer.keys"),
    ):
        actual = entries_of(cache, tables[1], length // ratio, unpack)
        # a value next to a tie may take the other fp4 step: at most one in a thousand does
        assert (actual == trace[key]).float().mean() >= 0.999
        assert actual.shape == trace[key].shape


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 150])
def test_any_ratio_and_chunk_equals_plain_pooling(ratio, size):
    ops, weights, length = golden.ops("float32"), weights_for(ratio, seed=ratio), 150
    compressor, tables = ops.prepare_compressor(weights), world.shuffled_tables({1: length, 2: length}, seed=size)
    state, pages, index_pages = caches(ratio, 3, world.num_blocks(tables), 32, 32, length=ratio + size % 3)
    x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(size))
    for start, count in world.chunks(length, size):
        stretches = [(2, start, count), (0, start, count), (1, start, count)]
        joined = torch.cat([x[1, start : start + count], x[0, start : start + count], x[0, start : start + count]])
        batch = world.make_batch(stretches, tables=tables)
        ops.compress(joined, batch, compressor, state, pages, index_pages)
    assert not pages[0].any()
    assert not index_pages[0].any()
    for slot in (1, 2):
        latent, keys = plain(x[slot - 1], weights)
        actual = entries_of(pages, tables[slot], length // ratio, quant.unpack_compressed)
        assert torch.equal(actual, latent)
        assert torch.equal(entries_of(index_pages, tables[slot], length // ratio, quant.unpack_index), keys)
        rest = pages[tables[slot]].flatten(0, 1)[length // ratio :]
        assert (rest == 0xFF).all()  # a partial group is not written


def plain(x: torch.Tensor, weights: CompressorWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed entries and index keys of a whole sequence, group by group."""
    ratio, groups = weights.ratio, len(x) // weights.ratio
    kv = oracle.matmul(x, weights.wkv.value.float())[: groups * ratio]
    if ratio > 1:
        score = oracle.matmul(x, weights.wgate.value.float())[: groups * ratio].unflatten(0, (groups, ratio))
        kv = (kv.unflatten(0, (groups, ratio)).double() * score.double().softmax(1)).sum(1).float()
    latent = rms(kv, weights.norm)
    steps = torch.arange(0, 8, 2, dtype=torch.float32) / 8
    angles = torch.outer((torch.arange(groups) * ratio).float(), 1.0 / (100.0**steps))
    key = rms(oracle.matmul(latent, weights.index_wk.value.float()), weights.index_norm)
    return oracle.fake_fp4_latent(oracle.rotate(latent, angles)), oracle.fake_fp4_index(oracle.rotate(key, angles))


def rms(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps).float()
    return norm.weight.value.float() * (x * scale)


def test_state_holds_the_rows_of_the_latest_positions():
    ops, weights = golden.ops("float32"), weights_for(3, seed=0)
    compressor, tables = ops.prepare_compressor(weights), world.shuffled_tables({1: 20})
    state, pages, index_pages = caches(3, 2, world.num_blocks(tables), 32, 32, length=5)
    x = torch.randn(17, 16, generator=torch.Generator().manual_seed(0))
    ops.compress(x, world.make_batch([(1, 0, 17)], tables=tables), compressor, state, pages, index_pages)
    rows = torch.stack([oracle.matmul(x, w.value.float()) for w in (weights.wkv, weights.wgate)], 1)
    for position in range(12, 17):
        assert torch.equal(state[1, position % 5], rows[position])
    assert not state[0].any()


def test_no_tokens_and_an_open_group_write_nothing():
    ops = golden.ops("exact")
    compressor, tables = ops.prepare_compressor(weights_for(4, seed=1)), world.shuffled_tables({1: 20})
    state, pages, index_pages = caches(4, 2, world.num_blocks(tables), 32, 32)
    before = pages.clone()
    for start, count in ((0, 0), (0, 3), (3, 0), (4, 3)):
        batch = world.make_batch([(1, start, count)], tables=tables)
        ops.compress(torch.ones(count, 16), batch, compressor, state, pages, index_pages)
    assert torch.equal(pages, before)
    assert torch.equal(index_pages[1:], torch.full_like(index_pages[1:], 0xFF))


def test_caches_that_do_not_fit_are_refused():
    ops, tables = golden.ops("fast"), world.shuffled_tables({1: 20})
    compressor = ops.prepare_compressor(weights_for(2, seed=1))
    state, pages, index_pages = caches(2, 2, 3, 32, 32)
    batch, x = world.make_batch([(1, 0, 2)], tables=tables), torch.zeros(2, 16)
    with pytest.raises(ShapeError, match="compressed pages has shape"):
        ops.compress(x, batch, compressor, state, pages[:, 1:], index_pages)
    with pytest.raises(ShapeError, match="needs its state ring"):
        ops.compress(x, batch, compressor, None, pages, index_pages)
    with pytest.raises(ShapeError, match="wgate only above ratio 1"):
        ops.prepare_compressor(CompressorWeights(**{**vars(weights_for(2, 0)), "wgate": None}))
