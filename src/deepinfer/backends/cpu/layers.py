"""Whole layers as one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, write_cache
from deepinfer.backends.cpu.indexer import CpuIndexer
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.tensors import LONG, POINTER, dense, empty
from deepinfer.errors import ShapeError
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Selection


class LayerStruct(ctypes.Structure):
    """`struct Layer` of native/layers.cpp."""

    _fields_ = (
        ("engram", POINTER),
        ("attention_hyper", POINTER),
        ("expert_hyper", POINTER),
        ("attention", POINTER),
        ("compressor", POINTER),
        ("indexer", POINTER),
        ("router", POINTER),
        ("experts", POINTER),
        ("shared_expert", POINTER),
        ("window", POINTER),
        ("pages", POINTER),
        ("index_pages", POINTER),
        ("state", POINTER),
        ("engram_place", LONG),
        ("tap_place", LONG),
        ("reads_entries", LONG),
        ("keeps_candidates", LONG),
        ("uses_candidates", LONG),
    )


class InputsStruct(ctypes.Structure):
    """`struct Inputs` of native/layers.cpp."""

    _fields_ = (
        ("batch", POINTER),
        ("max_position", LONG),
        ("num_columns", LONG),
        ("ngram_rows", POINTER),
        ("is_image", POINTER),
        ("taps", POINTER),
        ("num_taps", LONG),
    )


class ChoiceStruct(ctypes.Structure):
    """`struct Choice` of native/layers.cpp."""

    _fields_ = (("entries", POINTER), ("num_entries", LONG), ("candidates", POINTER), ("num_candidates", LONG))


@dataclass(frozen=True)
class CpuLayers:
    """A run of layers; `structs` points into what `layers` holds.

    selects: the last index source, whose entries are left over. keeps: the last candidate source.
    """

    layers: tuple[BoundLayer, ...]
    structs: ctypes.Array[LayerStruct]
    address: int
    selects: CpuIndexer | None
    keeps: CpuIndexer | None


def prepare_layers(layers: Sequence[BoundLayer]) -> CpuLayers:
    """Describe the layers to native code. Raises ShapeError for caches that do not fit them."""
    structs = (LayerStruct * len(layers))(*(_layer_struct(layer) for layer in layers))
    indexers = [layer.parts.indexer for layer in layers if layer.parts.indexer is not None]
    keeping = [layer.parts.indexer for layer in layers if layer.parts.keeps_candidates]
    return CpuLayers(
        tuple(layers), structs, ctypes.addressof(structs),
        indexers[-1] if indexers else None, keeping[-1] if keeping else None,
    )  # fmt: skip


def run_layers(state: LayerState, inputs: LayerInputs, layers: CpuLayers) -> LayerState:
    """Pass the tokens through the layers, in the state's own tensors where they are dense, and write their caches."""
    if not layers.layers:
        return state
    hyper, num_tokens = layers.layers[0].parts.attention_hyper, inputs.batch.num_tokens
    streams = dense("streams", state.streams, (num_tokens, hyper.num_streams, hyper.hidden))
    pre = dense("pre", state.pre, (num_tokens, hyper.num_streams))
    step, _step_tensors = step_inputs(inputs)
    given, _given_tensors = _given(state.selection, num_tokens)
    entries = candidates = entries_address = candidates_address = None
    if state.selection is not None:
        entries, candidates = state.selection.entries, state.selection.candidates
    if layers.selects is not None:
        entries = empty(num_tokens, layers.selects.num_entries(inputs.batch), dtype=np.int32)
        entries_address = entries.data_ptr()
    if layers.keeps is not None:
        candidates = empty(num_tokens, layers.keeps.num_kept(inputs.batch), dtype=np.int32)
        candidates_address = candidates.data_ptr()
    if native().run_layers(
        layers.address, len(layers.layers), ctypes.addressof(step), ctypes.addressof(given),
        streams.data_ptr(), pre.data_ptr(), entries_address, candidates_address,
    ):  # fmt: skip
        raise ShapeError("n-gram rows point outside of an engram table")
    return LayerState(streams, pre, None if entries is None else Selection(entries, candidates))


def step_inputs(inputs: LayerInputs) -> tuple[InputsStruct, list[Tensor]]:
    """The struct, and the tensors that it points into."""
    batch, kept, rows, image, num_columns = inputs.batch, [], None, None, 0
    if inputs.ngram_rows is not None:
        expect("n-gram rows", inputs.ngram_rows, (None, batch.num_tokens, None), torch.int64)
        kept.append(inputs.ngram_rows.contiguous())
        rows, num_columns = kept[-1].data_ptr(), kept[-1].shape[2]
    if inputs.is_image is not None:
        kept.append(dense("is_image", inputs.is_image, (batch.num_tokens,), torch.bool))
        image = kept[-1].data_ptr()
    struct = InputsStruct(batch_address(batch), batch.max_position, num_columns, rows, image)
    if inputs.taps is not None:
        expect("taps", inputs.taps, (batch.num_tokens, None, None), torch.float32)
        require(inputs.taps.is_contiguous(), "taps are written to and must be contiguous")
        struct.taps, struct.num_taps = inputs.taps.data_ptr(), inputs.taps.shape[1]
    return struct, kept


def _given(selection: Selection | None, num_tokens: int) -> tuple[ChoiceStruct, list[Tensor]]:
    """What the layers before selected as a struct, and the tensors that it points into."""
    choice, kept = ChoiceStruct(), []
    if selection is not None:
        expect("entries", selection.entries, (num_tokens, None), torch.int32)
        kept.append(selection.entries.contiguous())
        choice.entries, choice.num_entries = kept[-1].data_ptr(), kept[-1].shape[1]
        if selection.candidates is not None:
            expect("candidates", selection.candidates, (num_tokens, None), torch.int32)
            kept.append(selection.candidates.contiguous())
            choice.candidates, choice.num_candidates = kept[-1].data_ptr(), kept[-1].shape[1]
    return choice, kept


def _layer_struct(layer: BoundLayer) -> LayerStruct:
    parts, caches = layer.parts, layer.caches
    dim, window = parts.attention.dim, caches.window
    require(
        window.shape[1] >= parts.attention.window - 1,
        f"the window ring holds {window.shape[1]} positions; it must hold {parts.attention.window - 1}",
    )
    struct = LayerStruct(
        engram_place=parts.engram_place, tap_place=-1 if parts.tap_place is None else parts.tap_place,
        reads_entries=parts.reads_entries,
        keeps_candidates=parts.keeps_candidates, uses_candidates=parts.uses_candidates,
        window=write_cache("window ring", window, dim // 32 * 33),
    )  # fmt: skip
    for name in (
        "engram", "attention_hyper", "expert_hyper", "attention", "compressor", "indexer",
        "router", "experts", "shared_expert",
    ):  # fmt: skip
        part = getattr(parts, name)
        setattr(struct, name, None if part is None else part.address)
    if caches.pages is not None:
        struct.pages = write_cache("compressed pages", caches.pages, dim // 16 * 9)
    if caches.index_pages is not None:
        struct.index_pages = write_cache("index pages", caches.index_pages, caches.index_pages.shape[-1])
    if caches.state is not None:
        struct.state = write_cache("compressor state", caches.state, 2 * dim, torch.float32)
    require(parts.compressor is None or caches.pages is not None, "a compressor needs its pages")
    require(parts.indexer is None or caches.index_pages is not None, "an indexer needs its index pages")
    return struct
