"""How large an image is made for the model, and how many positions it takes in a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

LINE_END, START_AND_END = 1, 2  # learned vectors beside the cells: behind each row, and around all of them


@dataclass(frozen=True)
class ImageGeometry:
    """The image encoder's grid: pixels form patches, merge x merge patches form a cell, a cell is one position.

    An image of n x k cells takes n * (k + 1) + 2 positions: start, k cells and a line end for each row, end.

    patch_size: pixels. max_tokens: positions of one image. min_pixels: smaller images are made larger.
    max_aspect: width / height of the widest image; a wider one is squeezed. None = any.
    token_id: stands at every position of an image, and once for each image in a prompt as it is written.
    bytes_per_token: of the embedding of one position.
    """

    patch_size: int
    merge: int
    max_tokens: int
    min_pixels: int
    max_aspect: float | None
    token_id: int
    bytes_per_token: int

    @property
    def cell_size(self) -> int:
        """Pixels along one side of a cell."""
        return self.patch_size * self.merge

    def plan(self, width: int, height: int) -> tuple[int, int]:
        """The size in pixels (width, height) that an image is brought to, both multiples of the patch size.

        Every step is that of the released preprocessing, so that rounding falls the same way: squeeze what is
        too wide, enlarge what is too small, round up to whole patches; if that takes too many positions, the
        largest grid of whole cells in these proportions that does not.
        """
        wide: float = width
        if self.max_aspect is not None and wide > height * self.max_aspect:
            wide = height * self.max_aspect
        if 0 < wide * height < self.min_pixels:
            grow = (self.min_pixels / (wide * height)) ** 0.5
            wide, height = int(wide * grow), int(height * grow)
        size = self._whole_patches(wide), self._whole_patches(height)
        return size if self.num_tokens(*size) <= self.max_tokens else self._shrunk(wide, height)

    def num_tokens(self, width: int, height: int) -> int:
        """Positions of an image whose size in pixels is a plan."""
        rows, columns = (math.ceil(side // self.patch_size / self.merge) for side in (height, width))
        return rows * (columns + LINE_END) + START_AND_END

    def num_patches(self, width: int, height: int) -> int:
        """What the encoder computes on for an image whose size in pixels is a plan."""
        return (width // self.patch_size) * (height // self.patch_size)

    def _whole_patches(self, side: float) -> int:
        return math.ceil(side / self.patch_size) * self.patch_size

    def _shrunk(self, width: float, height: int) -> tuple[int, int]:
        """The largest size of these proportions: rows * (columns + 1) = max_tokens - 2 solved for real numbers."""
        shape, cell, room = height / width, self.cell_size, self.max_tokens - START_AND_END
        columns = math.sqrt(room / shape + 0.25) - 0.5
        rows = columns * shape
        if columns < 1:
            return cell, room // 2 * cell
        if rows < 1:
            return (room - LINE_END) * cell, cell
        fit = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
        patch = self.patch_size
        return math.floor(width * fit / patch) * patch, math.floor(height * fit / patch) * patch
