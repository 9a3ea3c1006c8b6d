"""ngram_rows against the reference: whole numbers, so always equal."""

from __future__ import annotations

import pytest
import torch

from backends.cpu import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import NgramSpec
from ops import golden, world

VOCAB, IMAGE = 50, 49


def random_spec(layers: int = 2, span: int = 4, heads: int = 3) -> NgramSpec:
    random = torch.Generator().manual_seed(span)
    multipliers = torch.randint(1, 2**55, (layers, span), generator=random) * 2 + 1
    primes = torch.tensor([101, 103, 107, 109, 113, 127, 131, 137, 139])[: (span - 1) * heads].view(span - 1, heads)
    return NgramSpec(
        token_map=torch.randint(0, 40, (VOCAB,), generator=random),
        pad=7,
        multipliers=tuple(tuple(row) for row in multipliers.tolist()),
        primes=(tuple(tuple(row) for row in primes.tolist()),) * layers,
        image_token=IMAGE,
    )


def both(spec: NgramSpec, tokens, batch, ring):
    return [ops.ngram_rows(tokens, batch, ring, ops.prepare_ngrams(spec)) for ops in (pair.cpu(), pair.reference())]


@pytest.mark.parametrize(("span", "heads"), [(2, 3), (3, 4), (4, 3)])
@pytest.mark.parametrize("length", [3, 4, 9])
def test_rows_equal_the_reference(span, heads, length):
    spec = random_spec(2, span, heads)
    random = torch.Generator().manual_seed(length)
    ring = torch.randint(0, VOCAB, (5, length), dtype=torch.int32, generator=random)
    for stretches in (
        [(1, 0, 40)],
        [(1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 77, 1)],
        [(2, 30, 5), (0, 0, 1), (3, 1, 2), (1, 9, 0), (4, 100, 13)],
    ):
        batch = world.make_batch(stretches)
        tokens = torch.randint(0, VOCAB, (batch.num_tokens,), generator=random)
        assert torch.equal(*both(spec, tokens, batch, ring))


def test_golden_rows_equal_the_reference():
    batch, ring = world.make_batch([(1, 5, 60)]), torch.full((2, 3), 3, dtype=torch.int32)
    assert torch.equal(*both(golden.ngrams(), torch.arange(60), batch, ring))


def test_chunks_give_the_same_rows_as_one_pass():
    spec, ops = random_spec(), pair.cpu()
    ngrams, tokens = ops.prepare_ngrams(spec), torch.arange(60) % VOCAB
    ring = torch.zeros(2, 4, dtype=torch.int32)
    whole = ops.ngram_rows(tokens, world.make_batch([(1, 0, 60)]), ring, ngrams)
    for size in (1, 2, 7):
        parts = []
        for start, count in world.chunks(60, size):
            batch = world.make_batch([(1, start, count)])
            parts.append(ops.ngram_rows(tokens[start : start + count], batch, ring, ngrams))
            ops.store_tokens(tokens[start : start + count], batch, ring)
        assert torch.equal(torch.cat(parts, 1), whole)


def test_no_tokens_give_no_rows_and_strides_change_nothing():
    spec, ring = random_spec(), torch.randint(0, VOCAB, (3, 5), dtype=torch.int32)
    for stretches in ([], [(1, 4, 0)]):
        assert both(spec, torch.empty(0, dtype=torch.int64), world.make_batch(stretches), ring)[0].shape == (2, 0, 9)
    batch, tokens = world.make_batch([(1, 3, 9), (2, 9, 4)]), torch.arange(13)
    expected = both(spec, tokens, batch, ring)[0]
    assert torch.equal(both(spec, pair.spread(tokens), batch, pair.spread(ring))[0], expected)


def test_unknown_tokens_and_short_rings_are_refused():
    spec, batch = random_spec(), world.make_batch([(1, 3, 2)])
    ops, ring = pair.cpu(), torch.zeros(3, 5, dtype=torch.int32)
    ngrams = ops.prepare_ngrams(spec)
    for tokens in ([0, VOCAB], [-1, 0], [0, 2**40]):
        with pytest.raises(ShapeError, match="not one of 50 known ids"):
            ops.ngram_rows(torch.tensor(tokens), batch, ring, ngrams)
    with pytest.raises(ShapeError, match="holds 2 tokens; it must hold 3"):
        ops.ngram_rows(torch.tensor([0, 1]), batch, ring[:, :2], ngrams)
