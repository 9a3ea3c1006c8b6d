"""The draft head's ops and attention of blocks against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backends.cpu.pair import random_norm, random_weight
from backends.cpu.test_attention import make_world
from backends.cuda import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.weights import DraftWeights, HeadWeights
from ops import golden

pytest.importorskip("triton", reason="triton is not installed")
HIDDEN, TAPS, VOCAB, RANK, STREAMS = 96, 3, 200, 64, 4
LIMIT = 6e-3
ROUNDED_LIMIT = 8e-2  # of a row of logits, both of whose factors lose 2.7 %


def some_weights():
    weights = DraftWeights(
        random_weight(HIDDEN, TAPS * HIDDEN, seed=1), random_norm(HIDDEN, 2), random_norm(HIDDEN, 3),
        random_weight(VOCAB, RANK, seed=4), random_weight(VOCAB, RANK, seed=5), random_weight(1, HIDDEN + RANK, seed=6),
    )  # fmt: skip
    return weights, HeadWeights(random_norm(HIDDEN, 7), random_weight(VOCAB, HIDDEN, seed=8))


def both():
    weights, head = some_weights()
    hopper, reference = pair.hopper(), pair.reference()
    ours = hopper.prepare_draft(pair.placed(weights), hopper.prepare_head(pair.placed(head)))
    return ours, reference.prepare_draft(weights, reference.prepare_head(head))


@pytest.mark.parametrize("count", [1, 5, 33])
def test_results_equal_the_reference(count):
    (ours, theirs), hopper, reference = both(), pair.hopper(), pair.reference()
    random = torch.Generator().manual_seed(count)
    streams = torch.randn(count, STREAMS, HIDDEN, generator=random).bfloat16()
    pre = torch.rand(count, STREAMS, generator=random)
    taps = torch.randn(count, TAPS, HIDDEN, generator=random).bfloat16().float()
    previous = torch.arange(count) % VOCAB
    assert golden.row_error(pair.wide(hopper.tap(pair.narrow(streams))), reference.tap(streams.float())) <= LIMIT
    main = hopper.draft_main(pair.placed(taps), ours)
    assert golden.row_error(pair.wide(main), reference.draft_main(taps, theirs)) <= LIMIT
    x, logits = hopper.draft_head(pair.narrow(streams), pair.placed(pre), ours)
    other_x, other_logits = reference.draft_head(streams.float(), pre, theirs)
    assert golden.row_error(pair.wide(x), other_x) <= LIMIT
    assert golden.row_error(pair.wide(logits), other_logits) <= ROUNDED_LIMIT
    row, confidence = hopper.draft_next(logits, x, pair.placed(previous), ours)
    other_row, other_confidence = reference.draft_next(pair.wide(logits), other_x, previous, theirs)
    assert golden.row_error(pair.wide(row), other_row) <= LIMIT
    assert pair.wide(confidence) == pytest.approx(other_confidence, abs=2e-2)
    token_ids, logprobs, again = hopper.draft_likeliest(logits, x, pair.placed(previous), ours)
    assert torch.equal(again, confidence) and token_ids.tolist() == row.argmax(-1).tolist()
    assert logprobs.tolist() == pytest.approx(hopper.best_logprobs(row).tolist(), abs=1e-6)


@pair.on_device
@pytest.mark.parametrize("count", [17, 40, 150])
def test_rows_have_the_same_bits_alone(count):
    (ours, _), hopper, random = both(), pair.hopper(), torch.Generator().manual_seed(count)
    streams = pair.narrow(torch.randn(count, STREAMS, HIDDEN, generator=random))
    pre, previous = (pair.placed(value) for value in (torch.rand(count, STREAMS), torch.arange(count) % VOCAB))
    taps = pair.placed(torch.randn(count, TAPS, HIDDEN, generator=random))
    x, logits = (value.repeat(3, 1).unflatten(0, (count, 3)) for value in hopper.draft_head(streams, pre, ours))
    given = logits[:, 1], x[:, 1]
    whole = *hopper.draft_next(*given, previous, ours), *hopper.draft_likeliest(*given, previous, ours)
    whole += hopper.draft_main(taps, ours), hopper.tap(streams)
    for part in (slice(0, 1), slice(5, 16), slice(count - 1, count)):
        inputs = [value[part] for value in (*given, previous)]
        own = [*hopper.draft_next(*inputs, ours), *hopper.draft_likeliest(*inputs, ours)]
        own += [hopper.draft_main(taps[part], ours), hopper.tap(streams[part])]
        assert all(torch.equal(alone, together[part]) for alone, together in zip(own, whole, strict=True))


@pytest.mark.parametrize(
    ("window", "stretches", "starts"),
    [(16, [(1, 40, 5), (2, 9, 5)], [0, 0]), (64, [(1, 80, 3), (2, 0, 3)], [70, 0]), (5, [(1, 100, 1)], [0])],
)
def test_blocks_of_drafts_see_their_row_and_the_window_before_it(window, stretches, starts):
    made = make_world(heads=4, dim=64, rope=32, window=window, ratio=2, top_k=8)
    q, rows, batch, ring, _, _ = made.step(stretches, window + 5, window_starts=starts, is_block=True)
    hopper, reference = pair.hopper(), pair.reference()
    given = (rows, batch, ring, None, None)
    ours = hopper.attend(pair.narrow(q), *map(pair.placed, given), hopper.prepare_attention(pair.placed(made.weights)))
    theirs = reference.attend(q.bfloat16().float(), *given, reference.prepare_attention(made.weights))
    assert golden.row_error(pair.wide(ours), theirs) <= LIMIT


def test_main_rows_are_the_window_rows_of_the_whole_path():
    made, hopper = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8), pair.hopper()
    prepared = hopper.prepare_attention(pair.placed(made.weights))
    x = pair.narrow(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)))
    positions = pair.placed(torch.arange(3, 10, dtype=torch.int32))
    assert torch.equal(hopper.main_rows(x, positions, prepared), hopper.attention_inputs(x, positions, prepared)[2])


def random_rows(count):
    random = torch.Generator().manual_seed(count)
    logits, x = torch.randn(count, VOCAB, generator=random), torch.randn(count, HIDDEN, generator=random)
    return pair.placed(logits), pair.narrow(x), pair.placed(torch.arange(count) % VOCAB)


def test_numbers_of_a_row_may_lie_apart():
    ours, hopper = both()[0], pair.hopper()
    logits, x, previous = random_rows(5)
    apart = logits.t().contiguous().t(), x.t().contiguous().t()
    assert not apart[0].is_contiguous() and not apart[1].is_contiguous()
    for op in (hopper.draft_next, hopper.draft_likeliest):
        for found, expected in zip(op(*apart, previous, ours), op(logits, x, previous, ours), strict=True):
            assert torch.equal(found, expected)


def test_a_token_before_that_is_no_id_adds_nothing():
    ours, hopper = both()[0], pair.hopper()
    logits, x, _ = random_rows(3)
    row, confidence = hopper.draft_next(logits, x, pair.placed(torch.tensor([-1, VOCAB, 2**40])), ours)
    assert torch.equal(row, logits)
    expected = pair.wide(x) @ pair.wide(ours.confidence)[0, :HIDDEN]
    assert pair.wide(confidence) == pytest.approx(expected, abs=1e-4)


def test_streams_of_another_width_are_refused():
    ours, hopper = both()[0], pair.hopper()
    streams = pair.narrow(torch.zeros(3, STREAMS, HIDDEN // 2))
    with pytest.raises(ShapeError, match="norm's x has shape"):
        hopper.draft_head(streams, pair.placed(torch.zeros(3, STREAMS)), ours)


def test_logits_go_only_where_the_numbers_of_a_row_lie_side_by_side():
    hopper = pair.hopper()
    head = hopper.prepare_head(pair.placed(some_weights()[1]))
    streams, pre = pair.narrow(torch.ones(3, STREAMS, HIDDEN)), pair.placed(torch.ones(3, STREAMS))
    with pytest.raises(ShapeError, match="side by side"):
        hopper.head(streams, pre, head, pair.placed(torch.zeros(VOCAB, 3)).t())


@pytest.mark.parametrize("name, shape", [("markov_head", (VOCAB, RANK - 32)), ("confidence", (1, HIDDEN))])
def test_weights_of_other_sizes_are_refused(name, shape):
    weights, head = some_weights()
    other = dataclasses.replace(weights, **{name: random_weight(*shape, seed=9)})
    hopper = pair.hopper()
    with pytest.raises(ShapeError, match=name.replace("_", " ")):
        hopper.prepare_draft(pair.placed(other), hopper.prepare_head(pair.placed(head)))
