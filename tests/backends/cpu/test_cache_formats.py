"""Cache rows: the bytes that native code writes, and the numbers that it reads out of them."""

from __future__ import annotations

import pytest
import torch

from deepinfer.backends.cpu.library import native
from deepinfer.ops.reference import quant

FORMATS = {
    "window": (0, quant.pack_window, quant.unpack_window),
    "compressed": (1, quant.pack_compressed, quant.unpack_compressed),
    "index": (2, quant.pack_index, quant.unpack_index),
}


def packed(x: torch.Tensor, name: str) -> torch.Tensor:
    number, pack, _ = FORMATS[name]
    rows = torch.zeros_like(pack(x))
    native().pack_rows(x.data_ptr(), len(x), x.shape[1], number, rows.data_ptr())
    return rows


def unpacked(rows: torch.Tensor, name: str, dim: int) -> torch.Tensor:
    x = torch.zeros(len(rows), dim)
    native().unpack_rows(rows.data_ptr(), len(rows), dim, FORMATS[name][0], x.data_ptr())
    return x


def hostile(dim: int) -> torch.Tensor:
    """Rows of every size of number, of ties between codes, of zeros, of rows with one large number."""
    random = torch.Generator().manual_seed(dim)
    normal = torch.randn(400, dim, generator=random)
    sizes = torch.ldexp(normal[:260], torch.arange(-130, 130).unsqueeze(1))
    ties = torch.randint(-512, 513, (200, dim), generator=random) / 64
    lone = torch.zeros(dim, dim).fill_diagonal_(3.7)
    signed_zeros = torch.tensor([0.0, -0.0]).repeat(1, dim // 2)
    powers = torch.ldexp(torch.ones(40, dim), torch.arange(-20, 20).unsqueeze(1)) * normal[:40].sign()
    return torch.cat([normal, sizes, ties, lone, lone - 1e-3, signed_zeros, powers, normal[:9] * 1e-4]).contiguous()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [32, 64, 128, 512])
def test_bytes_equal_the_reference(name, dim):
    x = hostile(dim)
    assert torch.equal(packed(x, name), FORMATS[name][1](x))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_spoil_their_block_alone(name):
    x = hostile(64)[:64].clone()
    x[torch.arange(64), torch.arange(64)] = torch.nan
    x[::2][torch.arange(32), 2 * torch.arange(32)] = torch.inf
    actual, expected = (FORMATS[name][2](rows) for rows in (packed(x, name), FORMATS[name][1](x)))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [32, 128])
def test_numbers_equal_the_reference_for_all_bytes(name, dim):
    width = FORMATS[name][1](torch.zeros(1, dim)).shape[1]
    rows = torch.randint(0, 256, (2000, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows[:256] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    if name == "window":  # a window row with e4m3 NaN codes or a scale above 2 ** 119 is never written
        rows[:, :dim][(rows[:, :dim] & 127) == 127] = 0
        rows[:, dim:].clamp_(max=246)
    actual, expected = unpacked(rows, name, dim), FORMATS[name][2](rows)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_a_window_row_with_a_nan_reads_as_nan():
    x = torch.ones(1, 64)
    x[0, 5] = torch.nan
    actual = unpacked(packed(x, "window"), "window", 64)
    assert actual[0, :32].isnan().all()
    assert torch.equal(actual[0, 32:], torch.ones(32))
