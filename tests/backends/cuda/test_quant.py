"""Number formats of the Hopper ops: the interpreter's and the device's conversions, and groups folded onto rows."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference import quant as reference

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
