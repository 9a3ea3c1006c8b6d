"""The image encoder's ops against the oracle, each on the oracle's own inputs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import v41_oracle
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.errors import ShapeError
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.vision import VisionTower
from deepinfer.model.v41.weights import ModelWeights

from . import golden

GRIDS = [(7, 10), (1, 1), (3, 3), (2, 19), (13, 4)]  # rows and columns of patches
PATCH, MERGE, BLOCKS = 14, 3, 2


@functools.cache
def oracle(precision: str) -> v41_oracle.Oracle:
    return v41_oracle.Oracle(golden.CHECKPOINT, precision)


@functools.cache
def weights() -> ModelWeights:
    return ModelWeights(Checkpoint(golden.CHECKPOINT), ModelConfig.from_file(golden.CHECKPOINT))


@functools.cache
def pixels(rows: int, columns: int) -> Tensor:
    draw = np.random.default_rng(rows * 100 + columns)
    return torch.from_numpy(draw.integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8))


def oracle_patches(image: Tensor) -> Tensor:
    """[P, 3, 14, 14], normalised."""
    samples = v41_oracle.bf16((image.float().permute(2, 0, 1) / 255 - 0.5) / 0.5)
    grid = samples.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 0, 2, 4)
    return grid.reshape(-1, 3, PATCH, PATCH)


@functools.cache
def steps(precision: str, rows: int, columns: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """From the oracle: the patches before each block and behind the last, those after the norm, the cells."""
    reference, seen = oracle(precision), []
    norm, trace = reference.norm, {}

    def spied(x: Tensor, name: str, *rest: float) -> Tensor:
        if name.endswith("norm1") or name == "vision.norm":
            seen.append(x.clone())
        return norm(x, name, *rest)

    reference.norm, reference.trace = spied, trace
    cells = reference.encode_image(v41_oracle.ImageSpan(0, oracle_patches(pixels(rows, columns)), rows, columns))
    reference.norm, reference.trace = norm, None
    return seen, trace["vision.output"], cells


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_every_op_gives_what_the_oracle_gives(precision: str, rows: int, columns: int) -> None:
    seen, _, cells = steps("exact" if precision == "exact" else "float32", rows, columns)
    ops = golden.ops(precision)
    results = [ops.embed_patches(pixels(rows, columns), ops.prepare_patches(weights().patches()))]
    for index in range(BLOCKS):
        block = ops.prepare_vision_block(weights().vision_block(index))
        results.append(ops.vision_block(seen[index], columns, block))
    results.append(ops.align(seen[-1], columns, ops.prepare_aligner(weights().aligner())))
    for ours, theirs in zip(results, [*seen, cells], strict=True):
        assert ours.shape == theirs.shape and ours.dtype is torch.float32
        # exact: bf16 results, which a last bit of a float32 score moves by a whole step now and then
        close = torch.isclose(ours, theirs, rtol=1e-2 if precision == "exact" else 1e-4, atol=1e-5)
        assert close.float().mean() > 0.999
        assert (ours - theirs).norm() <= (2e-3 if precision == "exact" else 1e-5) * theirs.norm()


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_the_tower_puts_delimiters_where_the_oracle_does(rows: int, columns: int) -> None:
    tower = VisionTower(ModelConfig.from_file(golden.CHECKPOINT).vision, golden.ops("float32"), weights())
    span = v41_oracle.ImageSpan(0, oracle_patches(pixels(rows, columns)), rows, columns)
    theirs = oracle("float32").image_rows(span, torch.tensor(span.types(MERGE)))
    ours = tower.encode(pixels(rows, columns))
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    delimiters = torch.tensor(span.types(MERGE)) != v41_oracle.IMAGE
    assert torch.equal(ours[delimiters], theirs[delimiters])


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_cells_of_the_golden_image_are_met(precision: str) -> None:
    known = golden.load_file(golden.GOLDEN / "goldens" / "image.safetensors")
    grid = known["patches"].float().unflatten(0, (7, 10)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    image = ((grid * 0.5 + 0.5) * 255).round().to(torch.uint8)  # what the normalised samples came from
    tower = VisionTower(ModelConfig.from_file(golden.CHECKPOINT).vision, golden.ops(precision), weights())
    theirs = known[f"aligner.output.{precision}"].float()
    cells = tower.encode(image)[1:-1].unflatten(0, (-1, 5))[:, :4].flatten(0, 1)
    assert (cells - theirs).norm() <= (0.0 if precision == "exact" else 1e-6) * theirs.norm()


def test_wrong_shapes_are_refused() -> None:
    ops = golden.ops("float32")
    with pytest.raises(ShapeError, match="15 x 28; both must be multiples of 14"):
        ops.embed_patches(torch.zeros(15, 28, 3, dtype=torch.uint8), ops.prepare_patches(weights().patches()))
    with pytest.raises(ShapeError, match="pixels is torch.float32; it must be torch.uint8"):
        ops.embed_patches(torch.zeros(14, 14, 3), ops.prepare_patches(weights().patches()))
    with pytest.raises(ShapeError, match="7 patches are no rows of 3"):
        ops.vision_block(torch.zeros(7, 64), 3, ops.prepare_vision_block(weights().vision_block(0)))
    with pytest.raises(ShapeError, match="7 patches are no rows of 3"):
        ops.align(torch.zeros(7, 64), 3, ops.prepare_aligner(weights().aligner()))
