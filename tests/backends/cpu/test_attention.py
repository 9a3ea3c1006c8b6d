"""attend and store_window against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from backends.cpu import pair
from deepinfer.backends.cpu.library import native
from deepinfer.errors import ShapeError
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import attention, quant
from deepinfer.ops.weights import AttentionWeights, RopeSpec, Weight
from ops import golden, world

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 5e-6  # the worst relative error of a row: float32 sums of up to 512 numbers in another order
ROUNDED_LIMIT = 1e-3  # where a last bit may decide the rounding of a share; 3e-3 is what rounding moves
FOLD_KEYS = 128  # keys that tiles fold in at a time


def weights_of(heads: int, dim: int, rope: int, window: int, seed: int = 0) -> AttentionWeights:
    return AttentionWeights(
        wq_a=pair.random_weight(32, 64, seed=seed),
        q_norm=pair.random_norm(32, seed),
        wq_b=pair.random_weight(heads * dim, 32, seed=seed + 1),
        wkv=pair.random_weight(dim, 64, seed=seed + 2),
        kv_norm=pair.random_norm(dim, seed + 3),
        sink=Weight(torch.randn(heads, generator=torch.Generator().manual_seed(seed))),
        wo_a=pair.random_weight(32, heads * dim, seed=seed + 4),
        wo_b=pair.random_weight(64, 32, seed=seed + 5),
        num_heads=heads,
        num_groups=1,
        window=window,
        rope=RopeSpec(rope, 10000.0),
    )


@dataclass(frozen=True)
class World:
    """Vectors of some requests by slot: queries, window rows and entries of every position, all pages written."""

    weights: AttentionWeights
    lengths: dict[int, int]
    tables: dict[int, list[int]]
    q: dict[int, Tensor]
    rows: dict[int, Tensor]
    entries: dict[int, Tensor]
    pages: Tensor

    def step(self, stretches: list[tuple[int, int, int]], ring_length: int, **changes):
        """Arguments of `attend` but the prepared weights: rings as they stand before these (slot, start, count)."""
        batch = world.make_batch(stretches, tables=self.tables, **changes)
        width = self.rows[next(iter(self.rows))].shape[1]
        ring = world.poisoned(max(self.lengths) + 1, ring_length, width)
        for slot, start, _ in stretches:
            for position in range(max(0, start - ring_length), start if slot else 0):
                ring[slot, position % ring_length] = self.rows[slot][position]
        parts = [
            torch.cat([values[slot or 1][start : start + count] for slot, start, count in stretches])
            for values in (self.q, self.rows, self.entries)
        ]
        return parts[0], parts[1], batch, ring, self.pages, parts[2]


@functools.cache
def make_world(heads=8, dim=128, rope=32, window=128, ratio=1, top_k=128, lengths=((1, 300), (2, 61)), seed=0) -> World:
    random = torch.Generator().manual_seed(seed)
    known = dict(lengths)
    tables = world.shuffled_tables(known, seed)
    pages = world.poisoned(world.num_blocks(tables), world.BLOCK_TOKENS // ratio, dim // 16 * 9)
    owned = [block for blocks in tables.values() for block in blocks]
    pages[owned] = quant.pack_compressed(torch.randn(len(owned), pages.shape[1], dim, generator=random))
    q, rows, entries = {}, {}, {}
    for slot, length in known.items():
        q[slot] = torch.randn(length, heads, dim, generator=random)
        rows[slot] = quant.pack_window(torch.randn(length, dim, generator=random))
        entries[slot] = torch.full((length, top_k), -1, dtype=torch.int32)
        for position in range(length):
            visible = (position + 1) // ratio
            chosen = torch.randperm(visible, generator=random)[:top_k].sort().values
            entries[slot][position, : len(chosen)] = chosen
    return World(weights_of(heads, dim, rope, window, seed), known, tables, q, rows, entries, pages)


def both(made: World, *arguments) -> tuple[Tensor, Tensor]:
    """Of the native op and of the reference, which rounds as tiles do where they are used."""
    entries = arguments[-1]

    def mix(_, q, keys, hidden, sink):
        return rounded_softmax(q, keys, hidden, sink, keys.shape[1] - (0 if entries is None else entries.shape[1]))

    actual = pair.cpu().attend(*arguments, pair.cpu().prepare_attention(made.weights))
    with mock.patch.object(attention, "_softmax", mix) if rounds() else contextlib.nullcontext():
        return actual, pair.reference().attend(*arguments, pair.reference().prepare_attention(made.weights))


def rounds() -> bool:
    return native().tile_parts() > 0


def limit() -> float:
    return ROUNDED_LIMIT if rounds() else LIMIT


def rounded_softmax(q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor, num_window: int) -> Tensor:
    """Queries are bf16, and so is each share against the peak so far; window and entries have a peak of their own."""
    q, keys, results = q.bfloat16().double(), keys.double(), []
    for query, own, none in zip(q, keys, hidden, strict=True):
        parts = []
        for part, start in ((slice(0, num_window), sink.double()), (slice(num_window, None), None)):
            peak = torch.full_like(query[:, 0], -1e30) if start is None else start
            total = torch.zeros_like(peak) if start is None else torch.ones_like(peak)
            result = torch.zeros_like(query)
            seen = own[part][~none[part]]
            for block in seen.split(FOLD_KEYS) if len(seen) else ():
                scores = query @ block.T * query.shape[1] ** -0.5
                before, peak = peak, torch.maximum(peak, scores.amax(1))
                shares, decay = (scores - peak[:, None]).exp(), (before - peak).exp()
                total = total * decay + shares.sum(1)
                result = result * decay[:, None] + shares.float().bfloat16().double() @ block
            parts.append((peak, total, result))
        last = torch.maximum(parts[0][0], parts[1][0])
        total = sum((peak - last).exp() * total for peak, total, _ in parts)
        results.append(sum((peak - last).exp()[:, None] * result for peak, _, result in parts) / total[:, None])
    return torch.stack(results).float()


@pytest.mark.parametrize(
    "shape",
    [
        dict(heads=8, dim=128, rope=32, window=128, ratio=1, top_k=128),  # nano
        dict(heads=8, dim=128, rope=32, window=128, ratio=2, top_k=128),
        dict(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8),  # golden
        dict(heads=3, dim=32, rope=8, window=5, ratio=3, top_k=7),
        dict(heads=1, dim=96, rope=96, window=1, ratio=5, top_k=1),
        dict(heads=13, dim=160, rope=2, window=70, ratio=4, top_k=37),
        dict(heads=64, dim=512, rope=64, window=128, ratio=2, top_k=64, lengths=((1, 150), (2, 9))),  # released
    ],
    ids=lambda shape: "-".join(map(str, shape.values()))[:30],
)
def test_result_equals_the_reference(shape):
    made = make_world(**shape)
    last = made.lengths[1] - 1
    for stretches in (
        [(1, last, 1)],
        [(1, 0, 1)],
        [(1, 0, last + 1)],
        [(2, 3, 5), (0, 0, 1), (1, 40, 80), (2, 0, 0)],
    ):
        actual, expected = both(made, *made.step(stretches, made.weights.window + 2))
        assert golden.row_error(actual, expected) <= limit()
        assert actual.isfinite().all()


def test_tiles_round_queries_to_the_nearest_bf16_numbers():
    made = make_world()
    q, *others = made.step([(1, 270, 30)], 128)
    prepared = pair.cpu().prepare_attention(made.weights)
    found, rounded = (pair.cpu().attend(each, *others, prepared) for each in (q, q.bfloat16().float()))
    assert torch.equal(found, rounded) == rounds()


def test_layers_without_entries_and_late_window_starts_equal_the_reference():
    made = make_world()
    for starts in ([0, 0], [250, 12], [285, 20]):
        q, rows, batch, ring, _, _ = made.step([(1, 280, 20), (2, 10, 30)], 127, window_starts=starts)
        if starts[0] > 280:  # tokens before the start see the sink alone
            q, rows, batch, ring, _, _ = made.step([(1, 285, 15), (2, 20, 30)], 127, window_starts=starts)
        actual, expected = both(made, q, rows, batch, ring, None, None)
        assert golden.row_error(actual, expected) <= limit()


def test_tokens_that_see_nothing_give_zeros():
    made = make_world()
    q, rows, batch, ring, pages, _ = made.step([(1, 5, 3)], 128, window_starts=[9])
    none = torch.full((3, 4), -1, dtype=torch.int32)
    prepared = pair.cpu().prepare_attention(made.weights)
    assert not pair.cpu().attend(q, rows, batch, ring, pages, none, prepared).any()


def test_five_thousand_entries_equal_the_reference():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=1, top_k=5000, lengths=((1, 5100),))
    actual, expected = both(made, *made.step([(1, 5097, 3)], 16))
    assert golden.row_error(actual, expected) <= limit()


def test_entries_that_do_not_exist_count_as_none():
    made = make_world()
    q, rows, batch, ring, pages, entries = made.step([(1, 290, 4)], 128)
    hostile = torch.tensor([-1, -(2**31), 2**31 - 1, 10**6, 360, -7], dtype=torch.int32)
    spoiled = torch.cat([hostile[:3].expand(4, -1), entries, hostile[3:].expand(4, -1)], dim=1)
    prepared = pair.cpu().prepare_attention(made.weights)
    expected = pair.cpu().attend(q, rows, batch, ring, pages, entries, prepared)
    assert torch.equal(pair.cpu().attend(q, rows, batch, ring, pages, spoiled, prepared), expected)
    broken = replace(batch, block_table=torch.full_like(batch.block_table, 10**6))
    alone = pair.cpu().attend(q, rows, batch, ring, pages, torch.full_like(entries, -1), prepared)
    assert torch.equal(pair.cpu().attend(q, rows, broken, ring, pages, entries, prepared), alone)


def test_slots_that_do_not_exist_read_as_padding():
    made = make_world()
    q, rows, batch, ring, pages, entries = made.step([(1, 290, 4)], 128)
    ops, prepared = pair.cpu(), pair.cpu().prepare_attention(made.weights)
    padding = replace(batch, row_slots=torch.zeros(1, dtype=torch.int32))
    expected = ops.attend(q, rows, padding, ring, pages, entries, prepared)
    for slot in (-1, 99):
        broken = replace(batch, row_slots=torch.tensor([slot], dtype=torch.int32))
        assert torch.equal(ops.attend(q, rows, broken, ring, pages, entries, prepared), expected)
        before = ring.clone()
        ops.store_window(rows, broken, ring)
        assert torch.equal(ring, before)


def test_spread_out_inputs_give_the_same_bits():
    made = make_world()
    q, rows, batch, ring, pages, entries = made.step([(1, 280, 20), (2, 10, 30)], 131)
    prepared = pair.cpu().prepare_attention(made.weights)
    expected = pair.cpu().attend(q, rows, batch, ring, pages, entries, prepared)
    parts = (pair.spread(value) for value in (q, rows, ring, pages, entries))
    q, rows, ring, pages, entries = parts
    spread_batch = TokenBatch(
        *(pair.spread(getattr(batch, name)) for name in list(vars(batch))[:7]), batch.block_tokens, batch.max_position
    )
    assert torch.equal(pair.cpu().attend(q, rows, spread_batch, ring, pages, entries, prepared), expected)
    pool = torch.zeros(len(pages), pages.shape[1] + 3, pages.shape[2], dtype=torch.uint8)  # a view into blocks
    pool[:, 2:-1] = pages
    assert torch.equal(pair.cpu().attend(q, rows, batch, ring, pool[:, 2:-1], entries, prepared), expected)


def test_no_tokens_give_no_rows():
    made = make_world()
    prepared = pair.cpu().prepare_attention(made.weights)
    for stretches in ([(1, 7, 0)], []):
        batch = world.make_batch(stretches, tables=made.tables)
        empty = (torch.empty(0, 8, 128), torch.empty(0, 132, dtype=torch.uint8))
        ring, entries = world.poisoned(2, 128, 132), torch.empty(0, 0, dtype=torch.int32)
        assert pair.cpu().attend(*empty, batch, ring, made.pages, entries, prepared).shape == (0, 8, 128)
        pair.cpu().store_window(empty[1], batch, ring)


@functools.cache
def crowd() -> World:
    return make_world(lengths=tuple((slot, 140 + 7 * slot) for slot in range(1, 34)), seed=5)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [2, 7, 32])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(size, num_threads):
    made, ops = crowd(), pair.cpu()
    prepared = ops.prepare_attention(made.weights)
    stretches = [(slot, made.lengths[slot] - 1 - slot % 3, 1 + slot % 3) for slot in range(1, size + 1)]
    with pair.threads(num_threads):
        together = ops.attend(*made.step(stretches, 128), prepared)
    offset = 0
    for stretch in stretches:
        alone = ops.attend(*made.step([stretch], 128), prepared)
        assert torch.equal(together[offset : offset + stretch[2]], alone), stretch
        offset += stretch[2]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 6, 31, 32, 33, 100])
def test_chunks_give_the_same_bits_as_one_pass(size, num_threads):
    made, ops = make_world(), pair.cpu()
    prepared = ops.prepare_attention(made.weights)
    whole = ops.attend(*made.step([(1, 0, 300)], 128), prepared)
    ring = world.poisoned(3, 128, 132)
    parts = []
    with pair.threads(num_threads):
        for start, count in world.chunks(300, size):
            q, rows, batch, _, pages, entries = made.step([(1, start, count)], 128)
            parts.append(ops.attend(q, rows, batch, ring, pages, entries, prepared))
            ops.store_window(rows, batch, ring)
    assert torch.equal(torch.cat(parts), whole)


def test_store_window_equals_the_reference_and_leaves_padding_alone():
    made = make_world()
    for stretches in ([(1, 5, 290)], [(1, 250, 3), (0, 0, 4), (2, 0, 61)], [(2, 60, 0)]):
        for length in (127, 128, 131, 1):
            _, rows, batch, _, _, _ = made.step(stretches, 128)
            rings = [world.poisoned(3, length, 132) for _ in range(2)]
            for ops, ring in zip((pair.cpu(), pair.reference()), rings, strict=True):
                ops.store_window(rows, batch, ring)
            assert torch.equal(*rings)
            assert not rings[0][0].any()


def test_wrong_shapes_are_refused_by_name():
    made = make_world()
    q, rows, batch, ring, pages, entries = made.step([(1, 290, 4)], 128)
    ops, prepared = pair.cpu(), pair.cpu().prepare_attention(made.weights)
    for match, arguments in (
        ("q has shape", (q[:1], rows, batch, ring, pages, entries)),
        ("window rows has shape", (q, rows[:, 1:], batch, ring, pages, entries)),
        ("ring holds 8 positions; it must hold 127", (q, rows, batch, ring[:, :8], pages, entries)),
        ("window ring is torch.uint8", (q, rows, batch, ring[..., :99], pages, entries)),
        ("together", (q, rows, batch, ring, pages, None)),
        ("compressed pages is torch.uint8", (q, rows, batch, ring, ring, entries)),
        ("entries is torch.int64", (q, rows, batch, ring, pages, entries.long())),
    ):
        with pytest.raises(ShapeError, match=match):
            ops.attend(*arguments, prepared)
    with pytest.raises(ShapeError, match="must lie side by side"):
        ops.store_window(rows, batch, pair.spread(ring))
