"""select against the reference, on whole numbers whose sums are exact: the same entries and candidates."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from backends.cpu.test_indexer import make_case, step
from backends.cuda import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import indexer as reference
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.weights import Weight
from ops import world

pytest.importorskip("triton", reason="triton is not installed")


def both(weights, case, stretches, candidates=None, given=None):
    x, low_rank, batch = step(case, stretches)
    theirs, ours = pair.reference(), pair.hopper()
    expected = theirs.select(x, low_rank, batch, theirs.prepare_indexer(weights), case[3], candidates)
    prepared = ours.prepare_indexer(pair.placed(weights))
    arguments = pair.narrow(x), pair.narrow(low_rank), pair.placed(batch), prepared, pair.placed(case[3])
    return expected, ours.select(*arguments, None if given is None else pair.placed(given))


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_and_candidates_equal_the_reference(ratio):
    case = make_case(ratio, ((1, 150), (2, 61)))
    source = dataclasses.replace(case[0], keeps_candidates=True)
    later = dataclasses.replace(source, keeps_candidates=False)
    for stretches in ([(1, 149, 1), (2, 60, 1)], [(1, 95, 5), (0, 0, 1), (2, 3, 1)]):
        expected, found = both(source, case, stretches)
        assert torch.equal(found.entries.cpu(), expected.entries)
        assert torch.equal(found.candidates.cpu(), expected.candidates)
        expected, found = both(later, case, stretches, expected.candidates, found.candidates)
        assert torch.equal(found.entries.cpu(), expected.entries)


def test_all_entries_are_taken_where_they_are_few():
    case = make_case(2, ((1, 10),))
    expected, found = both(case[0], case, [(1, 0, 10)])
    assert torch.equal(found.entries.cpu(), expected.entries)


@pair.on_device
def test_a_row_has_the_same_choice_alone_and_in_a_batch():
    case = make_case(1, ((1, 150), (2, 61)), 4, 64, False)
    _, together = both(case[0], case, [(1, 140, 5), (2, 50, 3)])
    for offset, stretch in ((0, (1, 140, 5)), (5, (2, 50, 3))):
        _, alone = both(case[0], case, [stretch])
        assert torch.equal(together.entries[offset : offset + stretch[2]], alone.entries)


def test_parts_give_the_same_choice(monkeypatch):
    from deepinfer.backends.cuda.hopper import indexer

    case = make_case(1, ((1, 150), (2, 61)), 4, 64, False)
    _, whole = both(case[0], case, [(1, 140, 5), (2, 50, 2)])
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 147 * 4)
    _, parts = both(case[0], case, [(1, 140, 5), (2, 50, 2)])
    assert torch.equal(parts.entries, whole.entries)


@pytest.mark.parametrize("width", [8, 4096])  # of which a piece of x is a multiple: four, or one
def test_queries_are_those_of_the_reference_on_one_scale_a_head(width, monkeypatch):
    from deepinfer.backends.cuda.hopper import indexer, linear

    monkeypatch.setattr(linear, "PIECE_WIDTH", width)
    case = make_case(1, ((1, 20),), 2, 64)
    rows = case[0].wq_b.value.unflatten(0, (2, 2, 32)) * torch.tensor([1.0, 32.0]).bfloat16().view(2, 1, 1)
    ones = Weight(torch.ones_like(case[0].weights_proj.value))
    weights = dataclasses.replace(case[0], wq_b=Weight(rows.flatten(0, 2)), weights_proj=ones)
    x, low_rank, batch = step(case, [(1, 3, 4)])
    x, exact = torch.ones_like(x), Numerics.of("exact")
    expected, shares = reference._queries(exact, x, low_rank, batch, reference.prepare_indexer(exact, weights))
    prepared = indexer.prepare_indexer(pair.placed(weights))
    codes, found = indexer._queries(pair.narrow(x), pair.narrow(low_rank), pair.placed(batch), prepared)
    scale = found.cpu().unsqueeze(-1) / shares.unsqueeze(-1)
    assert torch.equal(codes.cpu().view(torch.float8_e4m3fn).float().view(4, 2, 64) * scale, expected)


def released_case(starts: list[int], counts: list[int], octaves: int):
    """Queries, weights, pages of 128 keys and a batch of rows of the released index dimensions, and the keys.

    Groups of keys differ in size by up to twice as many octaves.
    """
    random = torch.Generator().manual_seed(5)
    num_tokens, columns = sum(counts), 5
    pages_used = len(starts) * columns + 1
    table = 1 + torch.randperm(pages_used - 1, generator=random).int().view(len(starts), columns)
    sizes = torch.exp2(torch.randint(-octaves, octaves + 1, (pages_used * 128, 4, 1), generator=random).float())
    keys = (torch.randn(pages_used * 128, 4, 32, generator=random) * sizes).flatten(1)
    packed = quant.pack_index(keys)
    q = quant.unpack_index(quant.pack_index(torch.randn(num_tokens * 32, 128, generator=random)))
    count, start = torch.tensor(counts), torch.tensor(starts, dtype=torch.int32)
    owner = torch.arange(len(starts), dtype=torch.int32).repeat_interleave(count)
    offsets = torch.cat([torch.zeros(1), count.cumsum(0)]).int()
    positions = start[owner] + torch.arange(num_tokens) - offsets[owner]
    batch = TokenBatch(
        positions.int(), owner, offsets, start, torch.arange(len(starts)).int() + 1, table, torch.zeros_like(start),
        128, int(positions.max()),
    )  # fmt: skip
    weights = torch.randn(num_tokens, 32, generator=random)
    return q.view(num_tokens, -1), weights, packed.view(pages_used, 128, 68), batch, quant.unpack_index(packed)


def folded(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, heads * d] as e4m3 on one scale for each head, and head weights that make up for it."""
    heads = q.unflatten(1, (weights.shape[1], -1))
    scale = torch.exp2((heads.abs().amax(-1, keepdim=True) / 6).log2().ceil() + 1)
    codes = (heads / scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float() * scale, heads)
    return codes.view(torch.uint8).flatten(1), weights * scale.squeeze(-1)


# Products are summed in half precision, which is nearly exact unless scales are far apart; Triton's sums are float32.
@pytest.mark.parametrize(("octaves", "tolerance"), [(1, 2e-4), (4, 2e-3)])
def test_scores_at_the_released_sizes_are_sums_of_products(octaves, tolerance):
    from deepinfer.backends.cuda.hopper import index_scores

    q, weights, pages, batch, keys = released_case([196, 63, 0], [3, 5, 1], octaves)
    shape = SimpleNamespace(ratio=1, num_heads=32, dim=128, candidate_size=8)
    visible, num_tokens = batch.positions + 1, len(q)
    blocks = torch.stack([torch.randperm(26)[:17].sort().values for _ in range(num_tokens)]).int()
    blocks[3, 9:] = -1
    placed, given = pair.placed(batch), folded(q, weights)
    given = *map(pair.placed, given), placed, shape, pair.placed(pages)
    scores, peaks = index_scores.entry_scores(*given, pair.placed(visible), 2, num_tokens)
    some = index_scores.candidate_scores(*given, pair.placed(blocks[2:]), pair.placed(visible), 2)
    for token in range(2, num_tokens):
        seen = keys.view(-1, 128, 128)[batch.block_table[batch.rows[token]].long()].flatten(0, 1)[: visible[token]]
        dots = seen.double() @ q[token].view(32, 128).double().T
        expected = (dots.relu() * weights[token].double()).sum(1)
        known = scores[token - 2, : len(seen)].cpu()
        assert float((known - expected).norm() / expected.norm()) <= (tolerance if pair.DEVICE.type == "cuda" else 1e-6)
        best = [float(part.max()) for part in known.split(8)]
        assert peaks[token - 2, : len(best)].tolist() == best
        for place, block in enumerate(blocks[token].tolist()):
            part = known[block * 8 : block * 8 + 8] if block >= 0 else known[:0]
            found = some[token - 2, place * 8 : place * 8 + len(part)].cpu()
            if pair.DEVICE.type == "cuda":
                assert torch.equal(found, part)
            else:
                torch.testing.assert_close(found, part)


def test_groups_far_below_the_largest_count_as_nothing_and_no_number_is_no_score():
    from deepinfer.backends.cuda.hopper import index_scores

    q, weights, pages, batch, _ = released_case([100], [4], 0)
    pages[..., 64:] = torch.tensor([90, 127, 90, 90], dtype=torch.uint8)
    only = pages.clone()
    only[..., :16], only[..., 32:64] = 0, 0
    pages[batch.block_table[0, 0], 5, 66] = 255
    shape, visible = SimpleNamespace(ratio=1, num_heads=32, dim=128, candidate_size=8), pair.placed(batch.positions + 1)
    given = [pair.placed(part) for part in folded(q, weights)]
    scores, few = (
        index_scores.entry_scores(*given, pair.placed(batch), shape, pair.placed(part), visible, 0, 4)
        for part in (pages, only)
    )
    assert scores[0][:, 5].isnan().all()
    assert torch.equal(scores[1][:, 0], scores[0][:, [0, 1, 2, 3, 4, 6, 7]].amax(1))
    known = torch.arange(101) != 5
    torch.testing.assert_close(scores[0][:, :101][:, known], few[0][:, :101][:, known], rtol=1e-5, atol=1e-4)


def test_candidates_that_hold_too_few_entries_are_refused():
    case = make_case(1, ((1, 8),))
    with pytest.raises(ShapeError, match="3 candidate blocks of 2 entries"):
        pair.hopper().prepare_indexer(dataclasses.replace(case[0], candidate_blocks=3, candidate_size=2))


def test_nothing_visible_gives_no_columns():
    case = make_case(4, ((1, 8),))
    _, found = both(case[0], case, [(1, 0, 3)])
    assert found.entries.shape == (3, 0)
    assert world.BLOCK_TOKENS % 4 == 0
