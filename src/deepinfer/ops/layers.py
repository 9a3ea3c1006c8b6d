"""A run of layers: what each of them holds, and the order in which it calls its ops.

A layer is an optional engram, then an attention half and an expert half, on m residual streams. A
backend may run whole layers as one op; `run_layers` here is what such an op must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.values import Mix, Selection

if TYPE_CHECKING:
    from deepinfer.ops.table import Ops


@dataclass(frozen=True)
class LayerParts:
    """What the prepare ops made of one layer's weights, None for parts that it lacks.

    engram_place: which of the step's n-gram rows are its own. tap_place: where the draft head finds this
    layer's input, None = it does not look. reads_entries: it attends to
    compressed entries besides its window. keeps_candidates, uses_candidates: its selection sets the
    candidate blocks of the layers after it, or is bound to those set before.
    """

    engram: Any
    engram_place: int
    tap_place: int | None
    attention_hyper: Any
    attention: Any
    compressor: Any
    indexer: Any
    expert_hyper: Any
    router: Any
    experts: Any
    shared_expert: Any
    reads_entries: bool
    keeps_candidates: bool
    uses_candidates: bool


@dataclass(frozen=True)
class LayerCaches:
    """The cache views of one layer: its window ring, the pages of its KV source, its compressor's state."""

    window: Tensor
    pages: Tensor | None
    index_pages: Tensor | None
    state: Tensor | None


@dataclass(frozen=True)
class BoundLayer:
    """A layer and the caches that it reads and writes."""

    parts: LayerParts
    caches: LayerCaches


@dataclass(frozen=True)
class LayerState:
    """What a layer hands to the next: streams [T, m, H], pre [T, m] and the selection that may be reused."""

    streams: Tensor
    pre: Tensor
    selection: Selection | None


@dataclass(frozen=True)
class LayerInputs:
    """What all layers read: the batch, n-gram rows [engram layers, T, columns], is_image [T]; None = no such thing.

    taps: [T, taps, H] float32, written by the layers that the draft head looks at; None = it wants nothing.
    """

    batch: TokenBatch
    ngram_rows: Tensor | None
    is_image: Tensor | None
    taps: Tensor | None = None


@dataclass(frozen=True)
class Entered:
    """A layer between its two steps: the attention half's input x [T, H] and mix."""

    streams: Tensor
    x: Tensor
    mix: Mix
    selection: Selection | None


@dataclass(frozen=True)
class Unspread:
    """A layer whose expert half is done but not left: its output [T, H] is not in the streams yet."""

    streams: Tensor
    output: Tensor
    mix: Mix
    selection: Selection | None


def run_layers(ops: Ops, state: LayerState, inputs: LayerInputs, layers: Sequence[BoundLayer]) -> LayerState:
    """One layer after the other."""
    if not layers:
        return state
    entered = enter_layer(ops, layers[0], state, inputs)
    for layer, after in pairwise(layers):
        entered = _enter_next(ops, after, _run_layer(ops, layer, entered, inputs), inputs)
    return leave_layer(ops, layers[-1], entered, inputs)


def enter_layer(ops: Ops, layer: BoundLayer, state: LayerState, inputs: LayerInputs) -> Entered:
    """Up to the compressor, which writes the global entries of every token that is here."""
    parts, streams = layer.parts, state.streams
    if parts.engram is not None:
        assert inputs.ngram_rows is not None
        streams = ops.engram(streams, inputs.ngram_rows[parts.engram_place], inputs.is_image, parts.engram)
    if parts.tap_place is not None and inputs.taps is not None:
        inputs.taps[:, parts.tap_place] = ops.tap(streams)
    x, mix = ops.hyper_enter(streams, state.pre, parts.attention_hyper)
    return _compressed(ops, layer, Entered(streams, x, mix, state.selection), inputs)


def leave_layer(ops: Ops, layer: BoundLayer, entered: Entered, inputs: LayerInputs) -> LayerState:
    """The attention of the tokens that are still here, and the expert half."""
    return _spread(ops, _run_layer(ops, layer, entered, inputs))


def keep_tokens(
    entered: Entered, inputs: LayerInputs, kept: Tensor | None, batch: TokenBatch
) -> tuple[Entered, LayerInputs]:
    """A layer's step and its inputs for the tokens `kept` [n] int64 alone, None = all; `batch` describes those."""
    mix, selection, rows, is_image, taps = (
        entered.mix, entered.selection, inputs.ngram_rows, inputs.is_image, inputs.taps,
    )  # fmt: skip
    if kept is None:
        return entered, LayerInputs(batch, rows, is_image, taps)
    if selection is not None:
        candidates = selection.candidates
        selection = Selection(selection.entries[kept], None if candidates is None else candidates[kept])
    mix = Mix(mix.pre[kept], mix.post[kept], mix.comb[kept])
    rows = None if rows is None else rows[:, kept]
    is_image = None if is_image is None else is_image[kept]
    taps = None if taps is None else taps[kept]
    return Entered(entered.streams[kept], entered.x[kept], mix, selection), LayerInputs(batch, rows, is_image, taps)


def _run_layer(ops: Ops, layer: BoundLayer, entered: Entered, inputs: LayerInputs) -> Unspread:
    parts = layer.parts
    output, selection = _attention(ops, layer, entered, inputs.batch)
    streams, x, mix = ops.hyper_next(entered.streams, output, entered.mix, parts.expert_hyper)
    chosen, share = ops.route(x, inputs.is_image, parts.router)
    output = ops.run_experts(x, chosen, share, parts.experts, parts.shared_expert)
    return Unspread(streams, output, mix, selection)


def _spread(ops: Ops, left: Unspread) -> LayerState:
    return LayerState(ops.hyper_leave(left.streams, left.output, left.mix), left.mix.pre, left.selection)


def _enter_next(ops: Ops, layer: BoundLayer, left: Unspread, inputs: LayerInputs) -> Entered:
    """The step from one layer to the next, in one op unless something looks at the streams between them."""
    parts = layer.parts
    if parts.engram is not None or (parts.tap_place is not None and inputs.taps is not None):
        return enter_layer(ops, layer, _spread(ops, left), inputs)
    streams, x, mix = ops.hyper_next(left.streams, left.output, left.mix, parts.attention_hyper)
    return _compressed(ops, layer, Entered(streams, x, mix, left.selection), inputs)


def _compressed(ops: Ops, layer: BoundLayer, entered: Entered, inputs: LayerInputs) -> Entered:
    """The same, the layer's global entries written."""
    parts, caches = layer.parts, layer.caches
    if parts.compressor is not None:
        assert caches.pages is not None and caches.index_pages is not None
        ops.compress(entered.x, inputs.batch, parts.compressor, caches.state, caches.pages, caches.index_pages)
    return entered


def _attention(ops: Ops, layer: BoundLayer, entered: Entered, batch: TokenBatch) -> tuple[Tensor, Selection | None]:
    """x [T, H] -> output [T, H] and the selection that the layers after this one may reuse."""
    parts, caches, x, selection = layer.parts, layer.caches, entered.x, entered.selection
    low_rank, q, window_rows = ops.attention_inputs(x, batch.positions, parts.attention)
    if parts.indexer is not None:
        assert caches.index_pages is not None
        known = selection.candidates if selection is not None else None
        given = known if parts.uses_candidates else None
        selection = ops.select(x, low_rank, batch, parts.indexer, caches.index_pages, given)
        if not parts.keeps_candidates:
            selection = replace(selection, candidates=known)
    entries = selection.entries if selection is not None and parts.reads_entries else None
    pages = caches.pages if entries is not None else None
    attended = ops.attend(q, window_rows, batch, caches.window, pages, entries, parts.attention)
    if not batch.is_block:
        ops.store_window(window_rows, batch, caches.window)
    return ops.project_out(attended, parts.attention), selection
