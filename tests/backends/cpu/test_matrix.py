"""Products with packed matrices: right in every format, and the same bits however many rows and threads there are."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.cpu import pair
from deepinfer.backends.cpu import build
from deepinfer.backends.cpu.matrix import (
    E2M1,
    FLOAT32,
    TILED_BFLOAT16,
    TILED_E4M3,
    TO_FP8,
    MatrixStruct,
    multiply,
    prepare_groups,
    prepare_matrix,
)
from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import Weight

pytestmark = pytest.mark.usefixtures("kind")
LIMIT = 5e-7  # float32 sums in blocks of 32, relative to the sum of the sizes of all products
SHAPES = [(16, 32), (256, 384), (33, 70), (5, 40), (24, 1536), (60, 100), (100, 34), (1, 2)]
FORMATS = ("float32", "bf16", "e4m3", "e2m1")


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def powers(*shape: int) -> torch.Tensor:
    return torch.randint(100, 150, shape, dtype=torch.uint8, generator=random(1)).view(torch.float8_e8m0fnu)


def matrix(number_format: str, rows: int, columns: int) -> Weight:
    values = torch.randn(rows, columns, generator=random())
    if number_format == "float32":
        return Weight(values)
    if number_format == "bf16":
        return Weight(values.bfloat16())
    if number_format == "e4m3":  # subnormal codes among them
        small = torch.where(torch.rand(values.shape, generator=random(2)) < 0.2, values * 0.01, values)
        return Weight(small.to(torch.float8_e4m3fn), powers(-(-rows // 32), -(-columns // 32)))
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=random())
    return Weight(codes, powers(rows, -(-columns // 32)))


def vectors(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=random(3))


def error(x: torch.Tensor, wide: torch.Tensor, actual: torch.Tensor) -> float:
    """Worst error of x @ wide.T relative to the same sums of sizes."""
    x = x.double()
    return float(((actual - x @ wide.T).abs() / (x.abs() @ wide.abs().T).clamp_min(1e-30)).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number_format", FORMATS)
def test_products_are_those_of_the_widened_matrix(number_format, shape):
    weight = matrix(number_format, *shape)
    packed, wide = prepare_matrix(weight), quant.dequantise(weight, torch.float64)
    for rows in (1, 2, 3, 5, 33):
        x = vectors(rows, shape[1])
        assert error(x, wide, multiply(x, packed)) < LIMIT, rows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number_format", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(number_format, shape):
    packed, x = prepare_matrix(matrix(number_format, *shape)), vectors(200, shape[1])
    alone = torch.cat([multiply(row.unsqueeze(0), packed) for row in x])
    for rows in (*range(14), 64, 200):
        assert torch.equal(multiply(x[:rows], packed), alone[:rows]), rows


@pytest.mark.parametrize("number_format", FORMATS)
def test_the_number_of_threads_changes_nothing(number_format):
    packed, x = prepare_matrix(matrix(number_format, 256, 384)), vectors(64, 384)
    alone = [multiply(x[:rows], packed) for rows in (1, 7, 64)]
    with pair.threads(2):
        for expected, rows in zip(alone, (1, 7, 64), strict=True):
            assert torch.equal(multiply(x[:rows], packed), expected)


def test_rows_of_x_may_lie_apart():
    packed, x = prepare_matrix(matrix("e4m3", 48, 64)), vectors(5, 64)
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(multiply(wide[:, :64], packed), multiply(x, packed))
    assert torch.equal(multiply(pair.spread(x), packed), multiply(x, packed))


def test_every_e4m3_and_e2m1_code_is_exact():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = torch.where((codes & 127) == 127, 0, codes).view(8, 32)  # 127 and 255 are NaN
    ones = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    e4m3 = Weight(numbers.view(torch.float8_e4m3fn), ones[:1])
    e2m1 = Weight(codes.view(16, 16).view(torch.int8), ones)
    for weight in (e4m3, e2m1):
        for rows in (1, 32):  # straight into the products, and by way of floats
            found = [multiply(part, prepare_matrix(weight)) for part in torch.eye(32).split(rows)]
            assert torch.equal(torch.cat(found), quant.dequantise(weight, torch.float32).T)


def test_scales_at_the_ends_of_their_range_are_kept(kind):
    weight, x = matrix("e2m1", 40, 96), vectors(5, 96)
    assert weight.scale is not None
    weight.scale.view(torch.uint8)[3, 1] = 0  # 2 ** -127, which counts as zero
    packed = prepare_matrix(weight)
    assert packed.structs[0].format == {"vectors": E2M1, "tiles": TILED_BFLOAT16}[kind]
    assert error(x, quant.dequantise(weight, torch.float64), multiply(x, packed)) < LIMIT


@pytest.fixture
def bf16_pairs() -> None:
    """For libraries whose tiles are formed by vectors of bf16 pairs."""
    if build.cpu_features(build.find_compiler()) != build.AVX512BF16:
        pytest.skip("needs AVX512-BF16")


@pytest.mark.usefixtures("bf16_pairs")
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 40])
def test_sums_of_bf16_pairs_have_the_order_of_their_instruction(kind, rows):
    """Intel Software Developer's Manual, VDPBF16PS: odd, then even numbers; what is below 2 ** -126 counts as zero."""
    if kind == "vectors":
        pytest.skip("vectors have an order of their own")
    sizes = torch.tensor([1.0, 2.0**-63, 2.0**-70]).repeat_interleave(32)
    x, weight = (vectors(rows, 96) * sizes).bfloat16(), (matrix("float32", 40, 96).value * sizes).bfloat16()
    x[0] = 0.0
    x[0, 64:] = vectors(1, 32) * 2.0**-57  # and nothing larger
    total = np.zeros((rows, 40), np.float32)
    wide_x, wide_weight = x.double().numpy(), weight.double().numpy()
    for block in range(0, 96, 32):
        added = np.zeros((rows, 40), np.float32)
        for even in range(block, block + 32, 2):
            for column in (even + 1, even):
                exact = added.astype(np.float64) + wide_x[:, column, None] * wide_weight[None, :, column]
                added = exact.astype(np.float32)
                added[np.abs(added) < 2.0**-126] = 0.0
        total += added
    found = multiply(x.float(), prepare_matrix(Weight(weight)))
    assert torch.equal(found, torch.from_numpy(total))


@pytest.mark.usefixtures("bf16_pairs")
def test_e4m3_codes_stay_packed_for_bf16_pairs_where_bf16_holds_them():
    weight, formats = matrix("e4m3", 40, 96), []
    assert weight.scale is not None
    scales, codes = weight.scale.view(torch.uint8), weight.value.view(torch.uint8)
    codes[:, 5] = 128  # minus zero
    with pair.tiles(True):
        for scale, code in ((10, 1), (246, 126), (9, 1), (247, 126), (127, 127)):
            scales[1, 1], codes[33, 40] = scale, code
            packed = prepare_matrix(weight)
            formats.append(packed.structs[0].format)
            if formats[-1] == TILED_E4M3:
                for rows in (1, 96):  # codes of a few rows are widened in registers
                    found = [multiply(part, packed) for part in torch.eye(96).split(rows)]
                    assert torch.equal(torch.cat(found), quant.dequantise(weight, torch.float32).T)
    assert formats == [TILED_E4M3] * 2 + [TILED_BFLOAT16] * 3


def test_matrices_that_share_their_input_are_stacked():
    first, second = matrix("e4m3", 40, 64), matrix("e4m3", 24, 64)
    x = vectors(3, 64)
    together = multiply(x, prepare_matrix(first, second))
    assert torch.equal(together, torch.cat([multiply(x, prepare_matrix(w)) for w in (first, second)], dim=1))


@pytest.mark.parametrize("number_format", FORMATS)
def test_groups_of_rows_are_matrices_of_their_own(number_format):
    weight, x = matrix(number_format, 80, 64), vectors(3, 64).bfloat16().float()  # tiles round their inputs to bf16
    groups, wide = prepare_groups(weight, 5), quant.dequantise(weight, torch.float64).unflatten(0, (5, 16))
    assert (len(groups.structs), groups.rows, groups.columns) == (5, 16, 64)
    for number in range(5):
        one = replace(groups, address=groups.address + number * ctypes.sizeof(MatrixStruct))
        assert error(x, wide[number], multiply(x, one)) < LIMIT


def test_float32_numbers_that_are_bf16_are_kept_as_bf16():
    values = torch.randn(16, 32, generator=random())
    kept = prepare_matrix(Weight(values.bfloat16().float()))
    assert prepare_matrix(Weight(values)).structs[0].format == FLOAT32
    assert kept.structs[0].format == prepare_matrix(Weight(values.bfloat16())).structs[0].format != FLOAT32


def test_large_numbers_overflow_to_infinity_and_nan_stays_nan():
    packed = prepare_matrix(matrix("e4m3", 16, 32))
    x = vectors(2, 32)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    found = multiply(x, packed)
    assert found[0].isnan().all()
    assert not found[1].isfinite().any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="same format"):
        prepare_matrix(matrix("bf16", 16, 32), matrix("e4m3", 16, 32))
    with pytest.raises(ShapeError, match="scales"):
        prepare_matrix(Weight(matrix("e4m3", 64, 64).value, powers(1, 2)))
    with pytest.raises(ShapeError, match="no 3 equal groups"):
        prepare_groups(matrix("bf16", 16, 32), 3)
    with pytest.raises(ShapeError, match="x has shape"):
        multiply(vectors(2, 31), prepare_matrix(matrix("bf16", 16, 32)))
    with pytest.raises(ShapeError, match="float64"):
        multiply(vectors(2, 32).double(), prepare_matrix(matrix("bf16", 16, 32)))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 447.0, 448.0, 449.0, 1e18])
def test_inputs_are_rounded_to_fp8_as_the_reference_rounds_them(size):
    unit = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    same = prepare_matrix(Weight(torch.eye(32).to(torch.float8_e4m3fn), unit), rounding=TO_FP8)
    x = vectors(60, 32) * size
    x[:20] *= torch.logspace(-8, 0, 32)  # far apart within a block
    x[20] = 0
    for rows in (1, 60):
        assert torch.equal(multiply(x[:rows], same), quant.round_fp8(x[:rows]))
    x[3, 4], x[7, 9] = torch.nan, torch.inf
    found, expected = multiply(x, same), quant.round_fp8(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
