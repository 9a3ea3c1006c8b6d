"""The attention of a stack of layers on given inputs, through rings, state and pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.table import Ops, Selection
from deepinfer.ops.weights import AttentionWeights, CompressorWeights, IndexerWeights
from ops.world import poisoned


@dataclass
class Layer:
    """Weights of one layer's attention; compressor and indexer where the layer owns one."""

    attention: AttentionWeights
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    ratio: int = 0


@dataclass
class Stack:
    """Prepared layers and their caches, poisoned wherever nothing was written."""

    ops: Ops
    layers: list[Layer]
    num_slots: int
    num_blocks: int
    block_tokens: int
    rings: list[Tensor] = field(default_factory=list)
    pages: list[tuple[Tensor | None, Tensor, Tensor] | None] = field(default_factory=list)

    def __post_init__(self):
        for layer in self.layers:
            dim = layer.attention.wkv.value.shape[0]
            self.rings.append(poisoned(self.num_slots, layer.attention.window, dim // 32 * 33))
            self.pages.append(self._pages(layer, dim))
        self.attention = [self.ops.prepare_attention(layer.attention) for layer in self.layers]
        self.compressors = [p.compressor and self.ops.prepare_compressor(p.compressor) for p in self.layers]
        self.indexers = [p.indexer and self.ops.prepare_indexer(p.indexer) for p in self.layers]

    def _pages(self, layer: Layer, dim: int):
        if layer.compressor is None:
            return None
        entries, width = self.block_tokens // layer.ratio, layer.compressor.index_wk.value.shape[0]
        state = poisoned(self.num_slots, layer.ratio, 2, dim, dtype=torch.float32) if layer.ratio > 1 else None
        pages = poisoned(self.num_blocks, entries, dim // 16 * 9)
        return state, pages, poisoned(self.num_blocks, entries, width // 32 * 17)

    def run(self, inputs: list[Tensor], batch: TokenBatch) -> tuple[list[Tensor], list[Selection | None]]:
        """Attention outputs and selections of every layer for one step; inputs [T, H] per layer."""
        outputs, selections, source, selection = [], [], None, None
        for number, (layer, x) in enumerate(zip(self.layers, inputs, strict=True)):
            attention, ring = self.attention[number], self.rings[number]
            low_rank, q, rows = self.ops.attention_inputs(x, batch.positions, attention)
            pages = entries = None
            if layer.compressor is not None:
                source = self.pages[number]
                state, pages, index_pages = source
                self.ops.compress(x, batch, self.compressors[number], state, pages, index_pages)
            if layer.indexer is not None:
                candidates = None if selection is None else selection.candidates
                selection = self.ops.select(x, low_rank, batch, self.indexers[number], source[2], candidates)
            if layer.ratio:
                pages, entries = source[1], selection.entries
            attended = self.ops.attend(q, rows, batch, ring, pages, entries, attention)
            self.ops.store_window(rows, batch, ring)
            outputs.append(self.ops.project_out(attended, attention))
            selections.append(selection if layer.indexer is not None else None)
        return outputs, selections
