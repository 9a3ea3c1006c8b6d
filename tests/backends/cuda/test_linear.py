"""Products against float64 sums, for widths and row counts that fill no tile, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference import quant as reference
from deepinfer.ops.weights import Weight
from ops import golden

linear = pytest.importorskip("deepinfer.backends.cuda.hopper.linear", reason="triton is not installed")
large_products = pytest.importorskip("deepinfer.backends.cuda.hopper.large_products", reason="triton is not installed")
matrices = pytest.importorskip("deepinfer.backends.cuda.hopper.matrices", reason="triton is not installed")
LIMIT = 2e-6  # float32 sums
FP8_LIMIT = 2e-6 if pair.DEVICE.type == "cpu" else 1e-3  # the matrix unit keeps few bits until a sum is moved out of it


def matrix(rows: int, width: int, seed: int = 0) -> Weight:
    random = torch.Generator().manual_seed(seed)
    return Weight((torch.randn(rows, width, generator=random) * width**-0.5).bfloat16())


def fp8(rows: int, width: int) -> Weight:
    codes = (matrix(rows, width).value * 64 * width**0.5).to(torch.float8_e4m3fn)
    return Weight(codes, torch.full((-(-rows // 32), width // 32), 115, dtype=torch.uint8).view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 3, 32), (5, 65, 96), (70, 130, 160)])
@pytest.mark.parametrize("make", [matrix, fp8])
def test_products_equal_the_reference(make, tokens, rows, width):
    weight, x = make(rows, width), matrix(tokens, width, seed=1).value
    prepared = matrices.prepare_matrix(pair.placed(weight), dtype=torch.float32)
    ours = linear.linear(x.to(pair.DEVICE), prepared)
    rounded = reference.round_fp8(x.float()) if weight.is_quantized else x
    expected = rounded.double() @ reference.dequantise(weight, torch.float64).T
    assert golden.row_error(pair.wide(ours), expected) <= (FP8_LIMIT if weight.is_quantized else LIMIT)


def test_a_matrix_kept_in_bf16_gets_the_rounded_input():
    weight, x = fp8(32, 64), matrix(3, 64, seed=1).value
    weight.scale.view(torch.uint8)[0, 0] = 107
    weight.value[:, :32] = (weight.value[:, :32].float() / 64).to(torch.float8_e4m3fn)
    weight.value[:, 32:] = 0
    weight.value[0, 32] = 1.0
    prepared = matrices.prepare_matrix(pair.placed(weight), dtype=torch.float32)
    assert prepared.rows.scale is None
    ours = linear.linear(x.to(pair.DEVICE), prepared)
    expected = reference.round_fp8(x.float()).double() @ reference.dequantise(weight, torch.float64).T
    assert golden.row_error(pair.wide(ours), expected) <= LIMIT


@pair.on_device
@pytest.mark.parametrize("make", [matrix, fp8])
def test_a_token_has_the_same_bits_alone_and_among_many(make):
    prepared, x = matrices.prepare_matrix(pair.placed(make(70, 160))), matrix(130, 160, seed=1).value.to(pair.DEVICE)
    together = linear.linear(x, prepared)
    for start, count in ((0, 1), (7, 16), (64, 17), (40, 64)):
        assert torch.equal(linear.linear(x[start : start + count], prepared), together[start : start + count])


@pytest.mark.parametrize("tokens", [33, 64, 70, 300])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, LIMIT), (torch.bfloat16, 4e-3)])  # rounded to bf16
def test_large_products_equal_the_reference(tokens, dtype, limit, monkeypatch):
    monkeypatch.setattr(large_products, "MIN_TILES", 1)
    if pair.DEVICE.type == "cpu":
        monkeypatch.setattr(large_products, "num_multiprocessors", lambda device: 3)  # some take a second tile
    weight, x = matrix(768, 128), matrix(tokens, 128, seed=1).value
    prepared = matrices.prepare_matrix(pair.placed(weight), dtype=dtype)
    monkeypatch.setattr(linear, "_launch", None)
    ours = linear.linear(x.to(pair.DEVICE), prepared)
    assert golden.row_error(pair.wide(ours), x.double() @ weight.value.double().T) <= limit


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "stride", "expected"),
    [
        (128, 24576, 64, 64, True),
        (33, 32768, 64, 72, True),
        (32, 32768, 64, 64, False),  # few tokens
        (128, 24320, 64, 64, False),  # 95 tiles
        (128, 32769, 64, 64, False),  # a broken tile
        (128, 32768, 72, 72, False),  # a broken step
        (128, 32768, 64, 68, False),  # tokens that begin between pieces of 16 bytes
    ],
)
def test_large_products_have_enough_whole_tiles(tokens, rows, width, stride, expected):
    x = torch.empty(tokens, stride, dtype=torch.bfloat16, device="meta")[:, :width]
    given = x.new_empty(rows, width), x.new_empty(tokens, -(-rows // 8) * 8)
    assert large_products.is_large(x, *given) == expected
    apart = torch.empty(tokens, 2 * stride, dtype=torch.bfloat16, device="meta")[:, : 2 * width : 2]
    assert not large_products.is_large(apart, *given)


@pair.on_device
def test_a_large_product_has_the_bits_of_small_ones():
    prepared = matrices.prepare_matrix(pair.placed(matrix(32768, 320)), dtype=torch.float32)
    x = matrix(600, 320, seed=1).value.to(pair.DEVICE)
    together = linear.linear(x, prepared)
    for start, count in ((0, 1), (7, 32), (64, 33), (99, 64), (40, 65), (0, 300)):
        assert torch.equal(linear.linear(x[start : start + count], prepared), together[start : start + count])


def test_no_tokens_give_no_rows():
    prepared = matrices.prepare_matrix(pair.placed(fp8(32, 64)))
    assert linear.linear(torch.empty(0, 64, dtype=torch.bfloat16, device=pair.DEVICE), prepared).shape == (0, 32)
