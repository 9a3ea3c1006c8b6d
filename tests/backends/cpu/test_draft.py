"""The draft head's native ops against the reference, and the same bits for rows alone and together."""

from __future__ import annotations

import functools

import pytest
import torch

from backends.cpu import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import DraftWeights, HeadWeights
from ops.golden import row_error

HIDDEN, TAPS, VOCAB, RANK, STREAMS = 96, 3, 200, 40, 4
LIMIT = 5e-6


@functools.cache
def prepared() -> tuple:
    """Of the native and the reference ops."""
    weights = DraftWeights(
        main_proj=pair.random_weight(HIDDEN, TAPS * HIDDEN, seed=1),
        main_norm=pair.random_norm(HIDDEN, 2),
        norm=pair.random_norm(HIDDEN, 3),
        markov_embed=pair.random_weight(VOCAB, RANK, seed=4),
        markov_head=pair.random_weight(VOCAB, RANK, seed=5),
        confidence=pair.random_weight(1, HIDDEN + RANK, seed=6),
    )
    head = HeadWeights(pair.random_norm(HIDDEN, 7), pair.random_weight(VOCAB, HIDDEN, seed=8))
    return tuple((ops, ops.prepare_draft(weights, ops.prepare_head(head))) for ops in (pair.cpu(), pair.reference()))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("count", [0, 1, 2, 5, 64, 301])
def test_results_equal_the_reference(count: int) -> None:
    (cpu, ours), (reference, theirs) = prepared()
    streams, pre, previous = random(count, STREAMS, HIDDEN), random(count, STREAMS), torch.arange(count) % VOCAB
    taps = random(count, TAPS, HIDDEN)
    assert row_error(cpu.tap(streams), reference.tap(streams)) < LIMIT
    assert row_error(cpu.draft_main(taps, ours), reference.draft_main(taps, theirs)) < LIMIT
    x, logits = cpu.draft_head(streams, pre, ours)
    other_x, other_logits = reference.draft_head(streams, pre, theirs)
    assert row_error(x, other_x) < LIMIT and row_error(logits, other_logits) < LIMIT
    (row, confidence), (other_row, other_confidence) = (
        cpu.draft_next(logits, x, previous, ours), reference.draft_next(logits, x, previous, theirs),
    )  # fmt: skip
    assert row_error(row, other_row) < LIMIT and confidence.shape == (count,)
    assert torch.allclose(confidence, other_confidence, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_rows_have_the_same_bits_alone_and_together(size: int) -> None:
    cpu, draft = prepared()[0]
    streams, pre, taps = random(64, STREAMS, HIDDEN), random(64, STREAMS), random(64, TAPS, HIDDEN)
    previous = torch.arange(64)
    x, logits = cpu.draft_head(streams, pre, draft)
    whole = (cpu.tap(streams), cpu.draft_main(taps, draft), x, logits, *cpu.draft_next(logits, x, previous, draft))
    whole += cpu.draft_likeliest(logits, x, previous, draft)
    for first in range(0, 64 - size + 1, size):
        part = slice(first, first + size)
        own_x, own = cpu.draft_head(streams[part], pre[part], draft)
        alone = (
            cpu.tap(streams[part]), cpu.draft_main(taps[part], draft), own_x, own,
            *cpu.draft_next(own, own_x, previous[part], draft), *cpu.draft_likeliest(own, own_x, previous[part], draft),
        )  # fmt: skip
        assert all(torch.equal(one[part], other) for one, other in zip(whole, alone, strict=True))


def test_strided_inputs_are_taken_and_wrong_shapes_refused() -> None:
    cpu, draft = prepared()[0]
    logits, x = random(6, 3, VOCAB), random(6, 3, HIDDEN)
    previous = torch.arange(6)
    strided = cpu.draft_next(logits[:, 1], x[:, 1], previous, draft)
    dense = cpu.draft_next(logits[:, 1].contiguous(), x[:, 1].contiguous(), previous, draft)
    assert all(torch.equal(one, other) for one, other in zip(strided, dense, strict=True))
    assert torch.equal(cpu.tap(pair.spread(random(3, STREAMS, HIDDEN))), cpu.tap(random(3, STREAMS, HIDDEN)))
    with pytest.raises(ShapeError, match="previous"):
        cpu.draft_next(logits[:, 1], x[:, 1], previous[:5], draft)
    with pytest.raises(ShapeError, match="tokens reach from 0 to 200; they must be ids below 200"):
        cpu.draft_next(logits[:, 1], x[:, 1], torch.tensor([0, 1, 2, 3, 4, VOCAB]), draft)
    with pytest.raises(ShapeError, match="x has shape"):
        cpu.draft_next(logits[:, 1], x[:5, 1], previous, draft)
