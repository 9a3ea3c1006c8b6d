"""Matrices prepared for products: tile scales folded onto rows, and what is kept in bf16."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference import quant as reference
from deepinfer.ops.weights import Weight

matrices = pytest.importorskip("deepinfer.backends.cuda.hopper.matrices", reason="triton is not installed")


def fp8_weight(exponents: torch.Tensor) -> Weight:
    random = torch.Generator().manual_seed(3)
    codes = (torch.randn(64, 96, generator=random) * 64).to(torch.float8_e4m3fn)
    return Weight(codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu))


def test_tile_scales_fold_onto_rows_without_loss_when_near():
    weight = fp8_weight(torch.tensor([[120, 121, 119], [118, 118, 120]]))
    matrix = matrices.prepare_matrix(*map(pair.placed, (weight, weight)), dtype=torch.float32)
    assert matrix.rows.values.dtype == torch.float8_e4m3fn and matrix.rounds_input
    ours = (matrix.rows.values.float() * matrix.rows.scale.unsqueeze(1)).cpu()
    expected = reference.dequantise(weight, torch.float32)
    # codes below 2 ** -6 of their row's largest scale are subnormal and lose bits
    assert float((ours - torch.cat([expected] * 2)).norm() / expected.norm()) < matrices.FOLDING_LIMIT * 2


@pytest.mark.parametrize("is_kept_in_bf16", [False, True])
def test_groups_of_rows_are_matrices_of_their_own_in_either_form(is_kept_in_bf16):
    weight = fp8_weight(torch.tensor([[110, 120, 110], [110, 120, 111]]))
    if is_kept_in_bf16:
        weight.value[:, 32:64] = 0.5
    grouped = matrices.prepare_matrix(pair.placed(weight), dtype=torch.float32, num_groups=4).rows
    whole = matrices.prepare_matrix(pair.placed(weight), dtype=torch.float32).rows
    assert torch.equal(grouped.values.flatten(0, 1).float(), whole.values.float()) and grouped.values.shape[0] == 4
    if is_kept_in_bf16:
        assert grouped.scale is None and whole.scale is None
    else:
        assert torch.equal(grouped.scale, whole.scale.view(4, 16))


def test_tile_scales_that_lie_far_apart_keep_the_matrix_in_bf16():
    weight = fp8_weight(torch.tensor([[110, 120, 110], [110, 120, 110]]))
    weight.value[:, 32:64] = 0.5  # the tiles with the large scale hold little
    matrix = matrices.prepare_matrix(pair.placed(weight))
    assert matrix.rows.scale is None and matrix.rounds_input
    assert torch.equal(matrix.rows.values.float().cpu(), reference.dequantise(weight, torch.float32))


def test_a_bf16_matrix_is_rounded_to_four_bits_on_a_scale_of_its_row():
    values = torch.tensor([[448.0, 1.0625, 1.1875, -(2.0**-6)], [900.0, 3.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    matrix = matrices.rounded(matrices.prepare_matrix(pair.placed(Weight(values.bfloat16())), dtype=torch.float32))
    assert matrix.rounds_input and matrix.dtype == torch.bfloat16
    assert matrix.rows.values.float().tolist() == [[448, 1, 1.25, -(2.0**-6)], [224, 0.75, 0, -0.25], [0, 0, 0, 0]]
    assert matrix.rows.scale.tolist()[:2] == [1, 4] and matrices.rounded(matrix) is matrix


def test_large_matrices_are_rounded_piece_by_piece(monkeypatch):
    values = torch.randn(70, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    bf16 = matrices.prepare_matrix(pair.placed(Weight(values)), dtype=torch.float32)
    whole = matrices.rounded(bf16)
    monkeypatch.setattr(matrices, "ROWS_AT_A_TIME", 16)
    for ours, expected in zip(matrices.rounded(bf16).rows, whole.rows, strict=True):
        assert torch.equal(ours.float(), expected.float())
