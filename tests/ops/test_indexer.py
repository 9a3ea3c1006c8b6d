"""select: entries and candidates against the oracle's traces and its selection on random scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import indexer as reference
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import IndexerWeights, RopeSpec, Weight
from ops import golden, world

SOURCE = {1: 1, 3: 1, 4: 4, 6: 4}  # index source -> KV source


def filled_pages(keys: torch.Tensor, blocks: list[int], ratio: int) -> torch.Tensor:
    """Index pages that hold these keys [entries, d] in these blocks; poison elsewhere."""
    per_block = world.BLOCK_TOKENS // ratio
    pages = world.poisoned(max(blocks, default=0) + 2, per_block, keys.shape[1] // 32 * 17)
    for entry, row in enumerate(quant.pack_index(keys)):
        pages[blocks[entry // per_block], entry % per_block] = row
    return pages


def as_sets(rows: torch.Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in rows.tolist()]


def is_left_packed(rows: torch.Tensor) -> bool:
    """Ascending, -1 only at the end, no value twice."""
    return all(row == sorted(set(row) - {-1}) + [-1] * row.count(-1) for row in rows.tolist())


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_choices_equal_the_oracle(length, precision):
    """Every traced choice has a margin above the error of the scores, so all must agree."""
    trace, ops, tables = golden.trace(length, precision), golden.ops(precision), world.shuffled_tables({1: length})
    batch, candidates = world.make_batch([(1, 0, length)], tables=tables), None
    for layer, source in SOURCE.items():
        name = f"layers.{layer}.attn"
        x = trace[f"{name}.input"]
        low_rank = ops.attention_inputs(x, batch.positions, ops.prepare_attention(golden.attention(layer)))[0]
        pages = filled_pages(trace[f"layers.{source}.attn.indexer.keys"], tables[1], golden.ratio(layer))
        selection = ops.select(x, low_rank, batch, ops.prepare_indexer(golden.indexer(layer)), pages, candidates)
        assert selection.entries.dtype == torch.int32
        assert is_left_packed(selection.entries)
        assert as_sets(selection.entries) == as_sets(trace[f"{name}.indexer.chosen"]), layer
        candidates = selection.candidates
        if layer < 4:
            assert candidates is None
        if layer == 4:
            mask = reference._inside(candidates, length, 8)
            visible = torch.arange(length) <= torch.arange(length).unsqueeze(1)
            assert is_left_packed(candidates)
            assert torch.equal(mask & visible, trace[f"{name}.indexer.candidates"] & visible)


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_scores_equal_the_oracle(precision):
    trace, ops, tables = golden.trace(33, precision), golden.ops(precision), world.shuffled_tables({1: 33})
    from deepinfer.ops.reference.numerics import Numerics

    numerics, batch = Numerics.of(precision), world.make_batch([(1, 0, 33)], tables=tables)
    for layer, source in SOURCE.items():
        name, ratio = f"layers.{layer}.attn", golden.ratio(layer)
        x = trace[f"{name}.input"]
        low_rank = ops.attention_inputs(x, batch.positions, ops.prepare_attention(golden.attention(layer)))[0]
        pages = filled_pages(trace[f"layers.{source}.attn.indexer.keys"], tables[1], ratio)
        indexer = ops.prepare_indexer(golden.indexer(layer))
        q, weights = reference._queries(numerics, x, low_rank, batch, indexer)
        tile = reference.Tile(0, 33, batch.rows[:1], 33 // ratio)
        actual = reference._scores(numerics, q, weights, batch, indexer, pages, tile)
        expected = trace[f"{name}.indexer.scores"]
        seen = expected > -torch.inf
        scale = expected[seen].abs().max()
        # exact: bf16 scores, one step where a sum lies between two; float32: last bits
        limit = 2**-8 if precision == "exact" else 1e-6
        assert ((actual - expected)[seen].abs() <= limit * scale).all()


def random_case(ratio: int, lengths: dict[int, int], seed: int, **changes):
    """Weights, inputs and filled pages of several requests; heads 2, width 32, hidden 8, q rank 12."""
    random = torch.Generator().manual_seed(seed)
    weights = IndexerWeights(
        wq_b=Weight(torch.randn(64, 12, generator=random)),
        weights_proj=Weight(torch.randn(2, 8, generator=random)),
        num_heads=2,
        top_k=5,
        ratio=ratio,
        rope=RopeSpec(8, 100.0),
        keeps_candidates=False,
        candidate_blocks=3,
        candidate_size=4,
    )
    weights = dataclasses.replace(weights, **changes)
    tables = world.shuffled_tables(lengths, seed)
    pages = world.poisoned(world.num_blocks(tables), world.BLOCK_TOKENS // ratio, 17)
    inputs = {}
    for slot, length in lengths.items():
        keys = torch.randn(length // ratio, 32, generator=random)
        x, low = torch.randn(length, 8, generator=random), torch.randn(length, 12, generator=random)
        inputs[slot] = (x, low, oracle.fake_fp4_index(keys))
        for entry, row in enumerate(quant.pack_index(keys)):
            block = tables[slot][entry * ratio // world.BLOCK_TOKENS]
            pages[block, entry % (world.BLOCK_TOKENS // ratio)] = row
    return weights, tables, pages, inputs


def plain_select(weights: IndexerWeights, x, low, keys, mask=None):
    """The oracle's selection over a whole sequence: entries as sets, candidate mask."""
    seq, ratio = len(x), weights.ratio
    steps = torch.arange(0, 8, 2, dtype=torch.float32) / 8
    angles = torch.outer(torch.arange(seq).float(), 1.0 / (100.0**steps))
    q = oracle.matmul(low, weights.wq_b.value).unflatten(-1, (2, 32))
    q = oracle.fake_fp4_index(oracle.rotate(q, angles))
    head = oracle.matmul(x, weights.weights_proj.value) * (32**-0.5 * 2**-0.5)
    dots = torch.einsum("shd,td->sht", q.double(), keys.double())
    scores = (dots.relu() * head.double().unsqueeze(-1)).sum(1).float()
    visible = ((torch.arange(seq) + 1) // ratio).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(len(keys)) >= visible, -torch.inf)
    kept = None
    if weights.keeps_candidates:
        stand_in = oracle.Oracle.__new__(oracle.Oracle)
        sizes = {"candidate_block_size": weights.candidate_size, "candidate_topk_blocks": weights.candidate_blocks}
        stand_in.config = oracle.Config(sizes, None, -1)
        kept = stand_in.candidate_mask(scores, visible)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    chosen = oracle.top_indices(scores, min(weights.top_k, len(keys)))
    return as_sets(torch.where(chosen < visible, chosen, -1)), kept


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("top_k", "size"), [(1, 150), (5, 7), (12, 1), (200, 40)])
def test_any_ratio_top_k_and_chunk_equals_plain_selection(ratio, top_k, size):
    lengths = {1: 150, 2: 61}
    changes = {"top_k": top_k, "keeps_candidates": True}
    source, tables, pages, inputs = random_case(ratio, lengths, seed=ratio + top_k, **changes)
    later = dataclasses.replace(source, keeps_candidates=False)
    ops = golden.ops("float32")
    first, second = ops.prepare_indexer(source), ops.prepare_indexer(later)
    results = {slot: ([], [], []) for slot in lengths}
    for start in range(0, 150, size):
        stretches = [(slot, start, min(size, length - start)) for slot, length in lengths.items() if start < length]
        batch = world.make_batch([*stretches, (0, 0, 1)], tables=tables)
        x, low = (
            torch.cat([inputs[s][i][a : a + n] for s, a, n in stretches] + [torch.zeros(1, width)])
            for i, width in ((0, 8), (1, 12))
        )
        kept = ops.select(x, low, batch, first, pages, None)
        refined = ops.select(x, low, batch, second, pages, kept.candidates)
        assert refined.candidates is kept.candidates
        num_entries = (batch.max_position + 1) // ratio
        assert kept.entries.shape == (len(x), min(top_k, num_entries))
        assert is_left_packed(kept.entries)
        assert is_left_packed(kept.candidates)
        offset = 0
        for slot, _, count in stretches:
            part = slice(offset, offset + count)
            results[slot][0].extend(as_sets(kept.entries[part]))
            results[slot][1].extend(as_sets(refined.entries[part]))
            results[slot][2].extend(as_sets(kept.candidates[part]))
            offset += count
    for slot, length in lengths.items():
        x, low, keys = inputs[slot]
        chosen, mask = plain_select(source, x, low, keys)
        assert results[slot][0] == chosen
        assert results[slot][1] == plain_select(later, x, low, keys, mask)[0]
        blocks = [{entry // 4 for entry in row.nonzero().flatten().tolist()} for row in mask]
        assert results[slot][2] == blocks
        assert len(chosen) == length


def test_candidates_hold_the_newest_block_and_fewer_than_top_k_are_filled_from_below():
    changes = {"top_k": 8, "candidate_blocks": 1, "keeps_candidates": True}
    weights, tables, pages, inputs = random_case(1, {1: 100}, seed=9, **changes)
    ops, (x, low, keys) = golden.ops("float32"), inputs[1]
    batch = world.make_batch([(1, 0, 100)], tables=tables)
    kept = ops.select(x, low, batch, ops.prepare_indexer(weights), pages, None)
    assert kept.candidates.squeeze(1).tolist() == [position // 4 for position in range(100)]
    later = dataclasses.replace(weights, keeps_candidates=False)
    refined = ops.select(x, low, batch, ops.prepare_indexer(later), pages, kept.candidates)
    assert refined.entries[99].tolist() == [0, 1, 2, 3, 96, 97, 98, 99]
    mask = plain_select(weights, x, low, keys)[1]
    assert as_sets(refined.entries) == plain_select(later, x, low, keys, mask)[0]


def test_small_tiles_change_nothing(monkeypatch):
    weights, tables, pages, inputs = random_case(2, {1: 150, 2: 61}, seed=3, keeps_candidates=True)
    ops = golden.ops("float32")
    indexer = ops.prepare_indexer(weights)
    x, low = (torch.cat([inputs[1][i], inputs[2][i]]) for i in (0, 1))
    prompt = world.make_batch([(1, 0, 150), (2, 0, 0), (2, 0, 61)], tables=tables)
    decode = world.make_batch([(1, 149, 1), (2, 60, 1)], tables=tables)
    ends = torch.tensor([149, 210])

    def select_both():
        yield ops.select(x, low, prompt, indexer, pages, None)
        yield ops.select(x[ends], low[ends], decode, indexer, pages, None)

    whole = list(select_both())
    monkeypatch.setattr(reference, "TILE_BYTES", 1500)
    tiled = list(select_both())
    for a, b in zip(tiled, whole, strict=True):
        assert torch.equal(a.entries, b.entries)
        assert torch.equal(a.candidates, b.candidates)
    assert torch.equal(whole[1].entries, whole[0].entries[ends])
    assert torch.equal(whole[1].candidates, whole[0].candidates[ends])


def test_top_entries_gives_ties_to_the_lower_column():
    scores = torch.tensor(
        [
            [0.0, -0.0, 1.0, -0.0, 0.0],
            [-torch.inf, 2.0, -torch.inf, -torch.inf, 2.0],
            [-1.0, -2.0, -1.0, -3.0, -1.0],
            [torch.inf, 1e-45, 0.0, -1e-45, -torch.inf],
        ]
    )
    for count in range(6):
        actual = reference.top_entries(scores, count)
        assert as_sets(actual) == as_sets(oracle.top_indices(scores, count))
    random = torch.Generator().manual_seed(0)
    many = torch.randint(-3, 4, (50, 1000), generator=random) / 2
    assert as_sets(reference.top_entries(many, 100)) == as_sets(oracle.top_indices(many, 100))


def test_nothing_visible_gives_no_columns():
    weights, tables, pages, inputs = random_case(4, {1: 8}, seed=1, keeps_candidates=True)
    ops = golden.ops("exact")
    indexer = ops.prepare_indexer(weights)
    x, low, _ = inputs[1]
    for count in (0, 3):
        batch = world.make_batch([(1, 0, count)], tables=tables)
        selection = ops.select(x[:count], low[:count], batch, indexer, pages, None)
        assert selection.entries.shape == (count, 0)
        assert selection.candidates.shape == (count, 0)


def test_pages_of_another_ratio_are_refused():
    weights, tables, pages, inputs = random_case(2, {1: 8}, seed=1)
    ops, (x, low, _) = golden.ops("fast"), inputs[1]
    batch = world.make_batch([(1, 0, 8)], tables=tables)
    with pytest.raises(ShapeError, match="index pages has shape"):
        ops.select(x, low, batch, ops.prepare_indexer(weights), pages[:, :30], None)
