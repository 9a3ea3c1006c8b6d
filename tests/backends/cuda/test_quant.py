"""Number formats of the Hopper ops: the interpreter's and the device's conversions, and scales folded onto rows."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference import quant as reference
from deepinfer.ops.weights import Weight

quant = pytest.importorskip("deepinfer.backends.cuda.hopper.quant", reason="triton is not installed")


def values(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, width, generator=random) * 2.0 ** torch.randint(-3, 4, (rows, 1), generator=random)
    ).bfloat16()


@pytest.mark.parametrize("width", [32, 96, 288])
def test_quantised_rows_are_the_reference_rounding(width):
    x = values(5, width)
    x[0] = 0
    codes, scale = quant.quantise(x.to(pair.DEVICE))
    ours = codes.float().cpu() * scale.cpu().unsqueeze(1)
    assert torch.equal(ours, reference.round_fp8(x.float()))


def test_groups_far_below_their_row_lose_what_the_page_says():
    x = values(4, 256)
    x[:, :32] *= 2.0**-9
    codes, scale = quant.quantise(x.to(pair.DEVICE))
    ours, expected = codes.float().cpu() * scale.cpu().unsqueeze(1), reference.round_fp8(x.float())
    assert torch.equal(ours[:, 32:], expected[:, 32:])
    assert 0 < float((ours - expected).norm() / expected.norm()) < 1e-4


def test_a_row_that_is_not_finite_spoils_itself_alone():
    x = values(3, 64)
    x[1, 5] = torch.inf
    codes, scale = quant.quantise(x.to(pair.DEVICE))
    products = (codes.float() * scale.unsqueeze(1)).cpu()
    assert not products[1].isfinite().all() and products[[0, 2]].isfinite().all()


def fp8_weight(exponents: torch.Tensor) -> Weight:
    random = torch.Generator().manual_seed(3)
    codes = (torch.randn(64, 96, generator=random) * 64).to(torch.float8_e4m3fn)
    return Weight(codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu))


def test_tile_scales_fold_onto_rows_without_loss_when_near():
    weight = fp8_weight(torch.tensor([[120, 121, 119], [118, 118, 120]]))
    matrix = quant.prepare_matrix(weight, weight)
    assert matrix.rows.values.dtype == torch.float8_e4m3fn and matrix.rounds_input
    ours = matrix.rows.values.float() * matrix.rows.scale.unsqueeze(1)
    expected = reference.dequantise(weight, torch.float32)
    # codes below 2 ** -6 of their row's largest scale are subnormal and lose bits
    assert float((ours - torch.cat([expected] * 2)).norm() / expected.norm()) < quant.FOLDING_LIMIT * 2


def test_tile_scales_that_lie_far_apart_keep_the_matrix_in_bf16():
    weight = fp8_weight(torch.tensor([[110, 120, 110], [110, 120, 110]]))
    weight.value[:, 32:64] = 0.5  # the tiles with the large scale hold little
    matrix = quant.prepare_matrix(weight)
    assert matrix.rows.scale is None and matrix.rounds_input
    assert torch.equal(matrix.rows.values.float(), reference.dequantise(weight, torch.float32))
