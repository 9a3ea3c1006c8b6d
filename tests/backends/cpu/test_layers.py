"""Whole layers and models in one native call against the same composed of ops."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends.cpu import family, pair
from backends.cpu.family import MODELS
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.cache.pools import CachePools
from deepinfer.errors import ShapeError
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.layer import layer_caches
from deepinfer.model.v41.model import BoundModel, Model
from deepinfer.ops.batch import ForwardBatch
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build
from deepinfer.ops.weights import Weight
from model_configs import config
from ops import world

pytestmark = pytest.mark.usefixtures("kind")
SLOTS, LENGTH = 3, 300


@functools.cache
def composed_ops() -> Ops:
    parts = {name: function for name, function in cpu_ops().items() if name not in ("prepare_layers", "run_layers")}
    return build({"reference": reference_ops("fast"), "cpu": parts})


@functools.cache
def packed_model(name: str, is_whole: bool, tile_parts: int) -> Model:
    return Model(config(name), pair.cpu() if is_whole else composed_ops(), family.weights(name))


def model(name: str, is_whole: bool) -> Model:
    return packed_model(name, is_whole, native().tile_parts())


def bound(name: str, is_whole: bool) -> tuple[BoundModel, CachePools]:
    layout = cache_layout(config(name))
    pools = CachePools(layout, SLOTS * -(-LENGTH // layout.block_tokens), SLOTS, torch.device("cpu"))
    return model(name, is_whole).bind(pools), pools


def step(name: str, stretches: list[tuple[int, int, int]], decoder_starts: list[int] | None = None) -> ForwardBatch:
    """Tokens of (slot, start, count), with those before their decoder start cut off at the boundary."""
    block_tokens = config(name).block_tokens
    columns = -(-LENGTH // block_tokens)
    tables = {slot: [1 + (slot - 1) * columns + c for c in range(columns)] for slot in range(1, SLOTS + 1)}
    batch = world.make_batch(stretches, tables=tables, block_tokens=block_tokens)
    tokens = torch.cat([prompt(name, slot)[start : start + count] for slot, start, count in stretches])
    decoder, kept = batch, None
    if decoder_starts is not None:
        later = [
            (s, max(b, d), max(0, b + n - max(b, d))) for (s, b, n), d in zip(stretches, decoder_starts, strict=True)
        ]
        decoder = world.make_batch(later, tables=tables, window_starts=decoder_starts, block_tokens=block_tokens)
        starts = torch.tensor(decoder_starts)[batch.rows.long()]
        kept = (batch.positions >= starts).nonzero().squeeze(1)
    return ForwardBatch(tokens, None, batch, decoder, kept, torch.arange(decoder.num_tokens))


def prompt(name: str, slot: int) -> Tensor:
    return family.integers(config(name).vocab_size - 1, LENGTH, seed=slot)


def logits(model: BoundModel, inputs: ForwardBatch) -> Tensor:
    return model.compute(inputs, len(inputs.logit_tokens)).logits


STEPS = [
    [(1, 0, 200), (2, 0, 1), (3, 0, 33)],
    [(1, 200, 1), (2, 1, 1), (3, 33, 1)],
    [(2, 2, 60), (1, 201, 1)],
    [(1, 202, 1)],
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_caches_have_the_bits_of_the_composed_layers(name, threads):
    (whole, whole_pools), (parts, parts_pools) = bound(name, True), bound(name, False)
    with pair.threads(threads):
        for stretches in STEPS:
            inputs = step(name, stretches)
            assert torch.equal(logits(whole, inputs), logits(parts, step(name, stretches)))
    assert torch.equal(whole_pools.blocks, parts_pools.blocks)
    assert torch.equal(whole_pools.slots, parts_pools.slots)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_cut_off_at_the_boundary_change_no_bits(name):
    (whole, whole_pools), (parts, parts_pools) = bound(name, True), bound(name, False)
    first, starts = [(1, 0, 200), (2, 0, 9)], [150, 9]
    results = [logits(one, step(name, first, starts)) for one in (whole, parts)]
    assert len(results[0]) == 50
    assert torch.equal(*results)
    assert torch.equal(*(logits(one, step(name, [(1, 200, 1)], [150])) for one in (whole, parts)))
    assert torch.equal(whole_pools.blocks, parts_pools.blocks)
    assert torch.equal(whole_pools.slots, parts_pools.slots)


def test_a_step_without_tokens_gives_no_logits():
    whole, _ = bound("nano", True)
    assert logits(whole, step("nano", [(1, 0, 0)])).shape == (0, config("nano").vocab_size)


def some_layers() -> tuple[Ops, list[BoundLayer], LayerState, LayerInputs]:
    ops, sizes = pair.cpu(), config("nano")
    _, pools = bound("nano", True)
    parts = model("nano", True).layers[2:4]
    layers = [BoundLayer(part, layer_caches(plan, pools)) for part, plan in zip(parts, sizes.layers[2:4], strict=True)]
    batch = step("nano", [(1, 0, 5)]).encoder
    streams, pre = family.normal(5, sizes.num_streams, sizes.hidden_size), family.uniform(5, sizes.num_streams)
    return ops, layers, LayerState(streams, pre, None), LayerInputs(batch, None, None)


def matrix_shape(weight: Weight) -> tuple[int, int]:
    """Rows and columns, of which two may lie in a byte."""
    rows, columns = weight.value.shape
    return rows, columns * (2 if weight.value.dtype in (torch.int8, torch.uint8) else 1)


def copied(state: LayerState) -> LayerState:
    """`run_layers` may overwrite what it is given."""
    return LayerState(state.streams.clone(), state.pre.clone(), state.selection)


def test_the_selection_of_the_last_index_source_is_handed_on():
    ops, layers, state, inputs = some_layers()
    whole = ops.run_layers(copied(state), inputs, ops.prepare_layers(layers))
    parts = composed_ops().run_layers(state, inputs, layers)
    assert torch.equal(whole.selection.entries, parts.selection.entries)
    assert whole.selection.candidates is parts.selection.candidates is None
    again = LayerState(whole.streams, whole.pre, whole.selection)
    reused = ops.run_layers(copied(again), inputs, ops.prepare_layers(layers[1:]))
    assert torch.equal(reused.selection.entries, whole.selection.entries)
    assert torch.equal(reused.streams, composed_ops().run_layers(again, inputs, layers[1:]).streams)


def test_no_layers_hand_the_state_on():
    ops, _, state, inputs = some_layers()
    assert ops.run_layers(state, inputs, ops.prepare_layers([])) is state


@pytest.mark.parametrize("names", [("w1", "w3"), ("w2",), ("w1", "w2", "w3")])
def test_a_shared_expert_may_be_stored_in_another_format_than_the_routed_ones(names):
    ops, layers, state, inputs = some_layers()
    given = family.weights("nano").shared_expert(2)
    wide = {name: Weight(family.normal(*matrix_shape(getattr(given, name))) / 16) for name in names}  # float32
    shared = ops.prepare_shared_expert(replace(given, **wide))
    layers = [replace(layers[0], parts=replace(layers[0].parts, shared_expert=shared))]
    whole = ops.run_layers(copied(state), inputs, ops.prepare_layers(layers))
    assert torch.equal(whole.streams, composed_ops().run_layers(state, inputs, layers).streams)


def test_what_does_not_fit_is_refused():
    ops, layers, state, inputs = some_layers()
    prepared = ops.prepare_layers(layers)
    for bad in (replace(state, streams=state.streams[:3]), replace(state, pre=state.pre.double())):
        with pytest.raises(ShapeError):
            ops.run_layers(bad, inputs, prepared)
    short = replace(layers[0].caches, window=layers[0].caches.window[:, :9])
    with pytest.raises(ShapeError, match="holds 9 positions"):
        ops.prepare_layers([replace(layers[0], caches=short)])
    with pytest.raises(ShapeError, match="pages"):
        ops.prepare_layers([replace(layers[0], caches=replace(layers[0].caches, pages=None, index_pages=None))])


def image_step() -> ForwardBatch:
    """Two rows, the second with three image tokens at its end; logits of four tokens, one twice."""
    inputs = step("nano", [(1, 0, 4), (2, 0, 5)])
    is_image = torch.arange(9) >= 6
    rows = family.normal(3, config("nano").hidden_size)
    return replace(inputs, is_image=is_image, image_rows=rows, logit_tokens=torch.tensor([3, 8, 0, 3]))


@pytest.mark.parametrize("num_lines", [0, 2, 4])
def test_lines_images_and_taps_of_a_whole_model_are_those_of_its_ops(num_lines):
    inputs, found = image_step(), []
    for is_whole in (True, False):
        one, pools = bound("nano", is_whole)
        taps = torch.zeros(9, 3, config("nano").hidden_size)
        computed = one.model.ops.run_model(inputs, taps, num_lines, one.whole)
        found.append((computed.logits, *computed.best, taps, pools.blocks, pools.slots, *(computed.hidden or ())))
    assert len(found[0]) == len(found[1]) == (6 if num_lines == 4 else 8)  # hidden only where more is wanted
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert found[0][0].shape == (num_lines, config("nano").vocab_size) and found[0][5].any()
    text = one.compute(replace(inputs, is_image=None, image_rows=None), 4).logits
    assert num_lines < 2 or not torch.equal(text[1], found[0][0][1])  # the last token is one of the image's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_rows": family.normal(2, 64)}, "image rows"),
        ({"is_image": torch.arange(9) >= 5}, "3 image rows for 4 image tokens"),
        ({"is_image": torch.arange(9) >= 7}, "3 image rows for 2 image tokens"),
        ({"is_image": None}, "3 image rows for 0 image tokens"),
    ],
)
def test_rows_of_images_must_be_those_of_the_image_tokens(change, message):
    one, _ = bound("nano", True)
    with pytest.raises(ShapeError, match=message):
        one.compute(replace(image_step(), **change), 2)


def test_a_whole_model_is_taken_apart_where_the_layers_are():
    assert pair.cpu().origin["run_model"] == "cpu" and composed_ops().origin["run_model"] == "composed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([1, 2, 5000])}, "not in the vocabulary"),
        ({"tokens": torch.tensor([1, -1, 2])}, "not in the vocabulary"),
        ({"tokens": torch.tensor([1, 2])}, "tokens has shape"),
        ({"logit_tokens": torch.tensor([0, 3])}, "logit token"),
        ({"logit_tokens": torch.tensor([-1, 0])}, "logit token"),
        ({"logit_tokens": torch.tensor([0])}, "2 lines of logits are wanted; there are 1"),
    ],
)
def test_a_whole_model_refuses_what_does_not_fit(change, message):
    one, _ = bound("nano", True)
    with pytest.raises(ShapeError, match=message):
        one.compute(replace(step("nano", [(1, 0, 3)]), **change), 2)
