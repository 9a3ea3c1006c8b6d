"""Attended heads rounded by groups: the numbers, where they lie in panels, and the grouped product of them."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import packed as layout
from backends.cuda import pair
from deepinfer.ops.reference import quant as reference
from deepinfer.ops.weights import Weight
from ops import golden

attended = pytest.importorskip("deepinfer.backends.cuda.hopper.attended", reason="triton is not installed")
linear = pytest.importorskip("deepinfer.backends.cuda.hopper.linear", reason="triton is not installed")
matrices = pytest.importorskip("deepinfer.backends.cuda.hopper.matrices", reason="triton is not installed")
products = pytest.importorskip("deepinfer.backends.cuda.hopper.products", reason="triton is not installed")


def heads(count: int, groups: int, width: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-9, 4, (count, groups, 1), generator=random)
    return (torch.randn(count, groups, width, generator=random).exp() * sizes).bfloat16()


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, groups, width] and scales [n, groups] of the smallest power of two on which e4m3 holds the largest."""
    peak = x.float().abs().amax(-1).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 448)))
    return (x.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(("count", "groups", "width"), [(1, 8, 4096), (11, 3, 160), (8, 1, 96), (3, 2, 128)])
def test_numbers_of_a_group_are_rounded_on_the_scale_of_the_largest(count, groups, width):
    x = heads(count, groups, width)
    x[0, 0] = 0
    x[-1, -1, 5] = -448 * 2.0**9  # the largest that this scale holds
    codes, scale = rounded(x)
    rows = attended.group_rows(x.to(pair.DEVICE))
    assert torch.equal(rows.values.view(torch.uint8).cpu(), codes.transpose(0, 1).contiguous().view(torch.uint8))
    assert torch.equal(rows.scale.cpu(), scale.T)


@pytest.mark.parametrize("count", [1, 8, 13])
def test_panels_hold_the_same_numbers_each_group_at_places_of_its_own(count):
    x = heads(count, 3, 160)
    codes, scale = rounded(x)
    panels = attended.group_panels(x.to(pair.DEVICE), 256)
    share = -(-count // 8) * 8
    assert panels.size == 3 * share and panels.num_tokens == count
    found = layout.panel_bytes(panels, 2).view(3, share, 256)[:, :count].cpu()
    assert torch.equal(found[..., :160], codes.view(torch.uint8).transpose(0, 1)) and not found[..., 160:].any()
    assert torch.equal(panels.scale[: 3 * share].view(3, share)[:, :count].cpu(), scale.T)


@pytest.mark.parametrize("count", [0, 1, 13])
def test_heads_in_panels_come_back_exactly_and_are_rounded_to_themselves(count):
    x = heads(count, 2, 8 * 32)
    codes, scale = rounded(x)
    panels = attended.group_panels(x.to(pair.DEVICE), 256)
    found = attended.AttendedPanels(panels, 2, 16, 32).heads()
    assert found.dtype is torch.bfloat16
    assert torch.equal(pair.wide(found), (codes.float() * scale.unsqueeze(-1)).view(count, 16, 32))
    again = attended.AttendedPanels(attended.group_panels(found.view(count, 2, 256), 256), 2, 16, 32)
    assert torch.equal(again.heads(), found)


def test_a_token_that_is_not_finite_spoils_itself_alone():
    x = heads(3, 2, 64)
    x[1, 0, 5] = torch.inf
    rows = attended.group_rows(x.to(pair.DEVICE))
    found = (rows.values.float() * rows.scale.unsqueeze(-1)).transpose(0, 1).isfinite().all(-1)
    assert found.tolist() == [[True, True], [False, True], [True, True]]


def weight(groups: int, rows: int, width: int, near: bool = True) -> Weight:
    """wo_a as stored, e4m3 with a scale a tile."""
    random = torch.Generator().manual_seed(groups)
    codes = (torch.randn(groups * rows, width, generator=random) * 64).to(torch.float8_e4m3fn)
    exponents = torch.full((-(-groups * rows // 32), width // 32), 115, dtype=torch.uint8)
    if not near:
        exponents[:, 0] = 95
        codes[:, 32:] = 0
        codes[0, 32] = 1.0
    return Weight(codes, exponents.view(torch.float8_e8m0fnu))


def product(x: torch.Tensor, stored: Weight) -> torch.Tensor:
    """Of the rounded input, in float64: [n, groups, rows]."""
    codes, scale = rounded(x)
    groups = reference.dequantise(stored, torch.float64).unflatten(0, (x.shape[1], -1))
    return torch.einsum("ngw,grw->ngr", codes.double() * scale.unsqueeze(-1).double(), groups)


@pytest.mark.parametrize("near", [True, False], ids=["e4m3", "kept in bf16"])
@pytest.mark.parametrize(("count", "groups", "rows", "width"), [(6, 3, 40, 64), (1, 1, 33, 96), (70, 2, 64, 160)])
def test_the_grouped_product_is_that_of_the_rounded_input(near, count, groups, rows, width):
    stored, x = weight(groups, rows, width, near), heads(count, groups, width)
    matrix = matrices.prepare_matrix(pair.placed(stored), num_groups=groups)
    assert isinstance(matrix.rows, products.Packed) or (matrix.rows.scale is not None) is near
    found = linear.grouped_linear(x.to(pair.DEVICE), matrix)
    assert found.shape == (count, groups, rows)
    assert golden.row_error(pair.wide(found).flatten(0, 1), product(x, stored).flatten(0, 1)) <= 4e-3  # as bf16


def test_the_input_of_a_matrix_that_is_not_quantised_is_not_rounded():
    x = heads(5, 2, 64)
    values = (torch.randn(2 * 24, 64, generator=torch.Generator().manual_seed(1)) / 8).bfloat16()
    matrix = matrices.prepare_matrix(pair.placed(Weight(values)), num_groups=2)
    found = linear.grouped_linear(x.to(pair.DEVICE), matrix)
    expected = torch.einsum("ngw,grw->ngr", x.double(), values.double().view(2, 24, 64))
    assert golden.row_error(pair.wide(found).flatten(0, 1), expected.flatten(0, 1)) <= 4e-3


def in_panels(x: torch.Tensor, num_heads: int):
    count, groups, width = x.shape
    panels = attended.group_panels(x.to(pair.DEVICE), width)
    return attended.AttendedPanels(panels, groups, num_heads, groups * width // num_heads)


def test_panels_of_attention_serve_a_matrix_of_any_form(monkeypatch):
    """Of a packed one as they are, by whatever multiplies it; else taken apart again."""
    stored, x = weight(2, 40, 256), heads(11, 2, 256)
    matrix = matrices.prepare_matrix(stored, num_groups=2)
    dense = matrices.Rows(*(value.to(pair.DEVICE) for value in unpacked(stored, 2)))
    given = matrix._replace(rows=dense)
    expected = linear.grouped_linear(x.to(pair.DEVICE), given)
    assert torch.equal(linear.grouped_linear(in_panels(x, 16), given), expected)
    if pair.DEVICE.type == "cpu":
        monkeypatch.setattr(linear, "products", layout.products)
    packed = given._replace(rows=products.pack_e4m3(dense.values, dense.scale))
    for each in (in_panels(x, 16), x.to(pair.DEVICE)):
        found = linear.grouped_linear(each, packed)
        assert golden.row_error(pair.wide(found).flatten(1), pair.wide(expected).flatten(1)) <= 4e-3
        assert pair.DEVICE.type == "cpu" or torch.equal(found, expected)


def unpacked(stored: Weight, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale, _ = matrices._fold(stored)
    return codes.unflatten(0, (groups, -1)), scale.unflatten(0, (groups, -1))


@pair.on_device
@pytest.mark.parametrize("form", products.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("groups", "rows", "width"), [(8, 1024, 4096), (3, 200, 384)])
@pytest.mark.parametrize("count", [1, 8, 33, 300, 1000])
def test_grouped_products_have_the_bits_of_triton(form, groups, rows, width, count, monkeypatch):
    monkeypatch.setattr(products, "form_for", lambda *given: form)
    codes, scale = (value.to(pair.DEVICE) for value in unpacked(weight(groups, rows, width), groups))
    matrix = matrices.Matrix(matrices.Rows(codes, scale), True, torch.bfloat16)
    x = heads(count, groups, width).to(pair.DEVICE)
    found = linear.grouped_linear(x, matrix._replace(rows=products.pack_e4m3(codes, scale)))
    assert torch.equal(found, linear.grouped_linear(x, matrix))


def test_no_tokens_give_no_rows():
    matrix = matrices.prepare_matrix(pair.placed(weight(2, 32, 64)), num_groups=2)
    assert linear.grouped_linear(heads(0, 2, 64).to(pair.DEVICE), matrix).shape == (0, 2, 32)
