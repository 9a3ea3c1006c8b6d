"""hyper_enter, hyper_leave, hyper_next, embed and head against the reference."""

from __future__ import annotations

import re

import pytest
import torch

from backends.cuda import pair
from deepinfer.errors import ShapeError
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HeadWeights, HyperWeights, NormWeights, Weight
from ops import golden

pytest.importorskip("triton", reason="triton is not installed")
from deepinfer.backends.cuda.hopper import hyper  # noqa: E402

LIMIT = 1e-5  # Sinkhorn rounds of float32 divisions, 16 bits of fn's mantissa
ROUNDED = 3e-3  # a bf16 result may round the other way


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(width: int) -> NormWeights:
    return NormWeights(Weight((1 + 0.2 * normal(width, seed=9)).bfloat16()), 1e-6)


def weights_of(streams: int, hidden: int, rounds: int) -> HyperWeights:
    width = (2 + streams) * streams
    fn, base = normal(width, streams * hidden, seed=4) * 0.05, normal(width, seed=5)
    return HyperWeights(Weight(fn), Weight(base), Weight(torch.tensor([0.5, 1.0, 2.0])), rounds, 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("streams", "hidden", "tokens"),
    [(4, 300, 3), (3, 40, 5), (1, 33, 2), pytest.param(4, 5120, 39, marks=pair.on_device)],
)
def test_results_are_those_of_the_reference(streams, hidden, tokens):
    given = weights_of(streams, hidden, 20), norm(hidden)
    x, pre = normal(tokens, streams, hidden).bfloat16(), torch.rand(tokens, streams)
    ours, theirs = pair.hopper(), pair.reference()
    entered, mix = ours.hyper_enter(pair.narrow(x), pair.placed(pre), ours.prepare_hyper(*pair.placed(given)))
    expected, expected_mix = theirs.hyper_enter(x.float(), pre, theirs.prepare_hyper(*given))
    assert golden.row_error(pair.wide(entered), expected) <= ROUNDED
    for name in ("pre", "post", "comb"):
        actual = pair.wide(getattr(mix, name)).flatten(1)
        assert golden.row_error(actual, getattr(expected_mix, name).flatten(1)) <= LIMIT, name
    output = normal(tokens, hidden, seed=3).bfloat16()
    left = ours.hyper_leave(pair.narrow(x), pair.narrow(output), pair.placed(expected_mix))
    expected = theirs.hyper_leave(x.float(), output.float(), expected_mix)
    assert golden.row_error(pair.wide(left).flatten(1), expected.flatten(1)) <= ROUNDED


@pair.on_device
@pytest.mark.parametrize(("hidden", "tokens"), [(128, 70), (5120, 70), (5120, 300), (5120, 1000)])
def test_a_token_has_the_same_bits_alone_and_among_many(hidden, tokens):
    ops, x, pre = pair.hopper(), pair.narrow(normal(tokens, 4, hidden)), pair.placed(torch.rand(tokens, 4))
    prepared = ops.prepare_hyper(*pair.placed((weights_of(4, hidden, 20), norm(hidden))))
    together, mix = ops.hyper_enter(x, pre, prepared)
    for token, count in ((0, 1), (63, 1), (69, 1), (5, 33), (17, 53)):
        part = slice(token, token + count)
        alone, own = ops.hyper_enter(x[part], pre[part], prepared)
        assert torch.equal(alone, together[part]) and torch.equal(own.comb, mix.comb[part])
        assert torch.equal(own.pre, mix.pre[part]) and torch.equal(own.post, mix.post[part])


@pytest.mark.parametrize(
    ("streams", "hidden", "tokens"),
    [
        (4, 300, 3),
        (1, 33, 2),
        *(pytest.param(4, 5120, tokens, marks=pair.on_device) for tokens in (1, 7, 48, 49, 1000)),
    ],
)
def test_the_next_half_is_entered_as_if_the_one_before_had_been_left(streams, hidden, tokens):
    ops = pair.hopper()
    prepared = ops.prepare_hyper(*pair.placed((weights_of(streams, hidden, 20), norm(hidden))))
    given, output = pair.narrow(normal(tokens, streams, hidden)), pair.narrow(normal(tokens, hidden, seed=3))
    shapes = (tokens, streams), (tokens, streams), (tokens, streams, streams)
    before = Mix(*(pair.placed(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes)))
    left, x, mix = ops.hyper_next(given, output, before, prepared)
    assert torch.equal(left, ops.hyper_leave(given, output, before))
    expected, expected_mix = ops.hyper_enter(left, before.pre, prepared)
    assert torch.equal(x, expected) and torch.equal(mix.comb, expected_mix.comb)
    assert torch.equal(mix.pre, expected_mix.pre) and torch.equal(mix.post, expected_mix.post)


def test_embedding_and_head_are_those_of_the_reference():
    table, head = Weight(normal(50, 96, seed=1).bfloat16()), HeadWeights(norm(96), Weight(normal(70, 96).bfloat16()))
    tokens, pre = torch.tensor([3, 49, 3]), torch.rand(3, 4)
    ours, theirs = pair.hopper(), pair.reference()
    streams, first = ours.embed(pair.placed(tokens), ours.prepare_embedding(pair.placed(table), 4))
    expected, expected_first = theirs.embed(tokens, theirs.prepare_embedding(table, 4))
    assert torch.equal(pair.wide(streams), expected) and torch.equal(first.cpu(), expected_first)
    logits = ours.head(streams, pair.placed(pre), ours.prepare_head(pair.placed(head)))
    assert golden.row_error(logits.cpu(), theirs.head(expected, pre, theirs.prepare_head(head))) <= ROUNDED


def test_no_tokens_and_wrong_shapes():
    ops = pair.hopper()
    prepared = ops.prepare_hyper(*pair.placed((weights_of(4, 64, 2), norm(64))))
    empty = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=pair.DEVICE)
    x, mix = ops.hyper_enter(empty, torch.empty(0, 4, device=pair.DEVICE), prepared)
    assert x.shape == (0, 64) and isinstance(mix, Mix)
    assert ops.hyper_leave(empty, x, mix).shape == (0, 4, 64)
    with pytest.raises(ShapeError, match="streams is torch.float32"):
        ops.hyper_enter(torch.zeros(1, 4, 64, device=pair.DEVICE), torch.zeros(1, 4, device=pair.DEVICE), prepared)


def test_the_sizes_in_python_are_those_of_the_source():
    text = hyper.NATIVE.read_text()
    assert "STREAMS = {}, HIDDEN = {}".format(*hyper.NATIVE_SIZES) in text
    names = "COLUMNS", "HALVES", "UNITS", "WARPS", "STAGES", "LINE", "FN_LINES", "FINISH_WARPS"
    columns, halves, units, warps, stages, line, fn_lines, finish_warps = (
        int(re.search(rf"\b{name} = (\d+)", text)[1]) for name in names
    )
    streams, hidden = hyper.NATIVE_SIZES
    assert (2 + streams) * streams == hyper.NATIVE_MIXES and warps == hyper.NATIVE_WARPS
    assert hyper.NATIVE_PARTS * units * halves * columns == hidden and (finish_warps + 1) * 32 == hyper.FINISH_THREADS
    lines = units * halves * streams * fn_lines + warps * stages * (streams + 1) * halves
    assert hyper.NATIVE_SHARED_BYTES == lines * line <= (232_448 - 2048) // 2  # two blocks on a multiprocessor


def test_packed_fn_holds_fragments_of_the_matrix_unit():
    """Of m16n8k16: lane 4 g + t holds rows g and 8 + g, pairs of columns 2 t and 8 + 2 t of its 16."""
    high, low = torch.randn(2, 32, 20480).bfloat16()
    packed = hyper.packed_fn(high, low)
    assert packed.shape[:4] == (160, 4, 2, 3) and packed.numel() == 2 * 24 * 20480
    rows = {0: (high, 0, high, 8), 1: (low, 0, low, 8), 2: (high, 16, low, 16)}
    for block, stream, half, tile, g, t in [(0, 0, 0, 0, 0, 0), (159, 3, 1, 2, 7, 3), (31, 2, 1, 1, 4, 2)]:
        first, at, second, other = rows[tile]
        column = stream * 5120 + block * 32 + 8 * t + 4 * half  # a lane's 8 columns lie side by side
        expected = [
            matrix[row + g, column + c : column + c + 2]
            for c in (0, 2)
            for matrix, row in ((first, at), (second, other))
        ]
        assert torch.equal(packed[block, stream, half, tile, g, t].flatten(), torch.cat(expected))
