"""The image encoder of a model: from the pixels of one image to the rows that stand at its positions."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.v41.config import VisionConfig
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.table import Ops


class VisionTower:
    """Prepared weights of vision transformer and aligner; stateless but for them."""

    def __init__(self, config: VisionConfig, ops: Ops, weights: ModelWeights) -> None:
        self._config, self._ops = config, ops
        self._patches = ops.prepare_patches(weights.patches())
        self._blocks = [ops.prepare_vision_block(weights.vision_block(index)) for index in range(config.num_layers)]
        self._aligner = ops.prepare_aligner(weights.aligner())
        self._start, self._line_end, self._end = weights.image_delimiters()  # [H] float32 each

    def encode(self, pixels: Tensor) -> Tensor:
        """The rows of an image [positions, H] float32: start, its cells with a line end behind each row, end.

        pixels: [height, width, 3] uint8, both sides multiples of the patch size.
        """
        ops, columns = self._ops, pixels.shape[1] // self._config.patch_size
        patches = ops.embed_patches(pixels, self._patches)
        for block in self._blocks:
            patches = ops.vision_block(patches, columns, block)
        cells = ops.align(patches, columns, self._aligner)
        lines = cells.unflatten(0, (-1, -(-columns // self._config.merge)))  # [n, k, H]
        ends = self._line_end.expand(lines.shape[0], 1, -1)
        return torch.cat([self._start[None], torch.cat([lines, ends], 1).flatten(0, 1), self._end[None]])
