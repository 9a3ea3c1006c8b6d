"""select against the reference, exactly where all arithmetic is exact, and the same bits in any batch.

Whole numbers as weights and inputs, no rotation, and heads * width a power of four make every score exact in
float32, whatever the order of its sums, and many of them equal. So the selections must be equal too.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from backends.cpu import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import IndexerWeights, RopeSpec, Weight
from ops import golden, world

pytestmark = pytest.mark.usefixtures("kind")
HIDDEN, RANK = 24, 16


def whole(*shape: int, most: int, random: torch.Generator) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=random).float()


@functools.cache
def make_case(ratio: int, lengths: tuple[tuple[int, int], ...], heads: int = 2, dim: int = 32, is_exact: bool = True):
    """Weights, inputs by slot, tables and filled pages."""
    random, known = torch.Generator().manual_seed(ratio), dict(lengths)
    numbers = whole if is_exact else lambda *shape, most, random: torch.randn(*shape, generator=random)
    weights = IndexerWeights(
        wq_b=Weight(numbers(heads * dim, RANK, most=1, random=random).bfloat16()),
        weights_proj=Weight(numbers(heads, HIDDEN, most=1, random=random).bfloat16()),
        num_heads=heads,
        top_k=5,
        ratio=ratio,
        rope=RopeSpec(0 if is_exact else 16, 10000.0),
        keeps_candidates=False,
        candidate_blocks=3,
        candidate_size=4,
    )
    tables = world.shuffled_tables(known, seed=ratio)
    pages = world.poisoned(world.num_blocks(tables), world.BLOCK_TOKENS // ratio, dim // 32 * 17)
    inputs = {}
    for slot, length in known.items():
        keys = quant.pack_index(numbers(length // ratio, dim, most=3, random=random))
        for entry, row in enumerate(keys):
            pages[tables[slot][entry * ratio // world.BLOCK_TOKENS], entry % pages.shape[1]] = row
        inputs[slot] = (
            numbers(length, HIDDEN, most=1, random=random),
            numbers(length, RANK, most=2, random=random),
        )
    return weights, inputs, tables, pages


def step(case, stretches: list[tuple[int, int, int]]):
    """x, low-rank queries and batch of (slot, start, count); slot 0 takes the inputs of slot 1."""
    _, inputs, tables, _ = case
    parts = [[inputs[slot or 1][i][start : start + count] for slot, start, count in stretches] for i in (0, 1)]
    x, low_rank = (torch.cat([torch.empty(0, width), *part]) for part, width in zip(parts, (HIDDEN, RANK), strict=True))
    return x, low_rank, world.make_batch(stretches, tables=tables)


def select(ops, weights: IndexerWeights, case, stretches, candidates=None):
    x, low_rank, batch = step(case, stretches)
    return ops.select(x, low_rank, batch, ops.prepare_indexer(weights), case[3], candidates)


def assert_equal(actual, expected) -> None:
    assert actual.entries.dtype == torch.int32
    assert torch.equal(actual.entries, expected.entries)
    assert (actual.candidates is None) == (expected.candidates is None)
    if expected.candidates is not None:
        assert actual.candidates.dtype == torch.int32
        assert torch.equal(actual.candidates, expected.candidates)


STEPS = [
    [(1, 0, 150)],
    [(1, 149, 1), (2, 60, 1)],
    [(2, 3, 5), (0, 0, 1), (1, 40, 80), (2, 0, 0)],
    [(1, 0, 1)],
    [(1, 70, 2), (2, 0, 61)],
]


@pytest.mark.parametrize("ratio", [1, 2, 3, 5])
@pytest.mark.parametrize("top_k", [1, 5, 12, 60, 200])
@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (3, 4), (2, 7), (5, 16), (40, 8)])
def test_selection_and_candidates_equal_the_reference(ratio, top_k, blocks, size):
    case = make_case(ratio, ((1, 150), (2, 61)))
    changes = dict(top_k=top_k, candidate_blocks=blocks, candidate_size=size)
    source = dataclasses.replace(case[0], keeps_candidates=True, **changes)
    later = dataclasses.replace(case[0], keeps_candidates=False, **changes)
    for stretches in STEPS:
        kept = [select(ops, source, case, stretches) for ops in (pair.cpu(), pair.reference())]
        assert_equal(*kept)
        given = kept[1].candidates
        refined = [select(ops, later, case, stretches, given) for ops in (pair.cpu(), pair.reference())]
        assert_equal(*refined)
        assert refined[0].candidates is given
        assert_equal(*(select(ops, later, case, stretches) for ops in (pair.cpu(), pair.reference())))


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 32), (4, 64), (8, 32), (16, 64), (2, 128), (3, 192)])
def test_any_heads_and_width_equal_the_reference(heads, dim):
    """3 x 192 is no power of four, but one factor for all heads leaves the order of whole numbers alone."""
    case = make_case(2, ((1, 150), (2, 61)), heads, dim)
    weights = dataclasses.replace(case[0], top_k=9, keeps_candidates=True)
    if heads == 3:
        weights = dataclasses.replace(weights, weights_proj=Weight(weights.weights_proj.value[:1].repeat(3, 1)))
    for stretches in STEPS:
        assert_equal(*(select(ops, weights, case, stretches) for ops in (pair.cpu(), pair.reference())))


@pytest.mark.parametrize("top_k", [128, 512])
def test_five_thousand_entries_equal_the_reference(top_k):
    case = make_case(1, ((1, 5003),), 2, 32)
    changes = dict(top_k=top_k, candidate_blocks=32, candidate_size=8)
    source = dataclasses.replace(case[0], keeps_candidates=True, **changes)
    later = dataclasses.replace(case[0], **changes)
    for stretches in ([(1, 5002, 1)], [(1, 4960, 40)]):
        kept = [select(ops, source, case, stretches) for ops in (pair.cpu(), pair.reference())]
        assert_equal(*kept)
        given = kept[1].candidates
        assert_equal(*(select(ops, later, case, stretches, given) for ops in (pair.cpu(), pair.reference())))


def test_real_numbers_choose_what_the_reference_chooses_but_next_to_a_tie():
    """A query's fp4 rounding may take the other step where a product differs in its last bit; few do."""
    case = make_case(2, ((1, 600), (2, 61)), 4, 64, False)
    weights = dataclasses.replace(case[0], top_k=64, keeps_candidates=True, candidate_blocks=8, candidate_size=16)
    actual, expected = (select(ops, weights, case, [(1, 0, 600), (2, 30, 4)]) for ops in (pair.cpu(), pair.reference()))
    assert (actual.entries == expected.entries).all(1).float().mean() >= 0.98
    assert (actual.candidates == expected.candidates).all(1).float().mean() >= 0.98


def test_golden_layers_choose_what_the_reference_chooses():
    trace, tables = golden.trace(200, "exact"), world.shuffled_tables({1: 200})
    batch = world.make_batch([(1, 0, 200)], tables=tables)
    for layer, source in ((1, 1), (3, 1), (4, 4), (6, 4)):
        x = trace[f"layers.{layer}.attn.input"]
        pages = world.poisoned(world.num_blocks(tables), world.BLOCK_TOKENS // golden.ratio(layer), 34)
        keys = quant.pack_index(trace[f"layers.{source}.attn.indexer.keys"])
        for entry, row in enumerate(keys):
            pages[tables[1][entry // pages.shape[1]], entry % pages.shape[1]] = row
        found = []
        for ops in (pair.cpu(), pair.reference()):
            low_rank = ops.attention_inputs(x, batch.positions, ops.prepare_attention(golden.attention(layer)))[0]
            found.append(ops.select(x, low_rank, batch, ops.prepare_indexer(golden.indexer(layer)), pages, None))
        assert (found[0].entries == found[1].entries).all(1).float().mean() >= 0.98


def test_candidates_that_do_not_exist_count_as_none():
    case = make_case(1, ((1, 150), (2, 61)))
    weights = dataclasses.replace(case[0], top_k=8)
    plain = torch.tensor([[3, 11, 20]] * 2, dtype=torch.int32)
    spoiled = torch.tensor([[-1, 3, -9, 11, 11, 3, 20, 38, 10**6, 2**31 - 1]] * 2, dtype=torch.int32)
    expected = select(pair.reference(), weights, case, [(1, 120, 2)], plain)
    actual = select(pair.cpu(), weights, case, [(1, 120, 2)], spoiled)
    assert torch.equal(actual.entries, expected.entries)


def test_blocks_that_do_not_exist_score_nothing():
    case = make_case(1, ((1, 150), (2, 61)))
    x, low_rank, batch = step(case, [(1, 149, 1)])
    ops, weights = pair.cpu(), dataclasses.replace(case[0], keeps_candidates=True)
    for number in (10**6, -3):
        broken = dataclasses.replace(batch, block_table=torch.full_like(batch.block_table, number))
        found = ops.select(x, low_rank, broken, ops.prepare_indexer(weights), case[3], None)
        assert found.entries.tolist() == [[0, 1, 2, 3, 4]]  # all scores are 0: ties go to the lower
        assert found.candidates.tolist() == [[0, 1, 37]]


@functools.cache
def crowd():
    return make_case(1, tuple((slot, 60 + 11 * slot) for slot in range(1, 34)), 4, 64, False)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [2, 7, 32])
def test_a_row_gives_the_same_choice_alone_and_in_any_batch(size, num_threads):
    case, lengths = crowd(), {slot: 60 + 11 * slot for slot in range(1, 34)}
    weights = dataclasses.replace(case[0], top_k=20, keeps_candidates=True, candidate_blocks=4, candidate_size=8)
    stretches = [(slot, lengths[slot] - 1 - slot % 3, 1 + slot % 3) for slot in range(1, size + 1)]
    with pair.threads(num_threads):
        together = select(pair.cpu(), weights, case, stretches)
    offset = 0
    for stretch in stretches:
        alone = select(pair.cpu(), weights, case, [stretch])
        part = slice(offset, offset + stretch[2])
        assert torch.equal(together.entries[part, : alone.entries.shape[1]], alone.entries)
        assert torch.equal(together.candidates[part, : alone.candidates.shape[1]], alone.candidates)
        offset += stretch[2]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 31, 32, 33])
def test_chunks_give_the_same_choice_as_one_pass(size, num_threads):
    case = crowd()
    source = dataclasses.replace(case[0], top_k=20, keeps_candidates=True, candidate_blocks=4, candidate_size=8)
    later = dataclasses.replace(source, keeps_candidates=False)
    kept = select(pair.cpu(), source, case, [(33, 0, 423)])
    refined = select(pair.cpu(), later, case, [(33, 0, 423)], kept.candidates)
    with pair.threads(num_threads):
        for start, count in world.chunks(423, size):
            part = slice(start, start + count)
            one = select(pair.cpu(), source, case, [(33, start, count)])
            two = select(pair.cpu(), later, case, [(33, start, count)], kept.candidates[part])
            for found, expected in ((one.entries, kept.entries), (two.entries, refined.entries)):
                assert torch.equal(found, expected[part, : found.shape[1]])
                assert (expected[part, found.shape[1] :] == -1).all()


def test_spread_out_inputs_give_the_same_choice():
    case = make_case(2, ((1, 150), (2, 61)))
    x, low_rank, batch = step(case, [(1, 100, 20), (2, 10, 30)])
    ops, given = pair.cpu(), torch.arange(4, dtype=torch.int32).repeat(50, 1)
    prepared = ops.prepare_indexer(case[0])
    expected = ops.select(x, low_rank, batch, prepared, case[3], given).entries
    x, low_rank, pages, given = (pair.spread(value) for value in (x, low_rank, case[3], given))
    assert torch.equal(ops.select(x, low_rank, batch, prepared, pages, given).entries, expected)


def test_nothing_visible_gives_no_columns():
    case = make_case(4, ((1, 8),))
    weights = dataclasses.replace(case[0], keeps_candidates=True)
    for stretches in ([], [(1, 0, 0)], [(1, 0, 3)]):
        found = select(pair.cpu(), weights, case, stretches)
        count = sum(stretch[2] for stretch in stretches)
        assert found.entries.shape == found.candidates.shape == (count, 0)


def test_wrong_shapes_are_refused_by_name():
    case = make_case(2, ((1, 8),))
    ops, (x, low_rank, batch) = pair.cpu(), step(case, [(1, 0, 8)])
    prepared = ops.prepare_indexer(case[0])
    for match, arguments in (
        ("index pages has shape", (x, low_rank, batch, prepared, case[3][:, :30], None)),
        ("x has 7 rows", (x[:7], low_rank, batch, prepared, case[3], None)),
        ("low-rank query has shape", (x, low_rank[:, 1:], batch, prepared, case[3], None)),
        ("candidates is torch.int64", (x, low_rank, batch, prepared, case[3], torch.zeros(8, 2).long())),
    ):
        with pytest.raises(ShapeError, match=match):
            ops.select(*arguments)
