"""Packed bytes against the oracle's fake rounding, and stored weights against its dequantisation."""

from __future__ import annotations

import math

import pytest
import torch
import v41_oracle as oracle
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import Weight
from ops import golden

FORMATS = {
    "window": (quant.pack_window, quant.unpack_window, oracle.fake_fp8, 33 / 32),
    "compressed": (quant.pack_compressed, quant.unpack_compressed, oracle.fake_fp4_latent, 9 / 16),
    "index": (quant.pack_index, quant.unpack_index, oracle.fake_fp4_index, 17 / 32),
}


def hostile_values() -> torch.Tensor:
    """[rows, 64]: ordinary, tiny, huge, denormal, zero, signed zero, exact ties, powers of two."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(64, generator=random) * 2.0**power for power in (-140, -120, -30, -12, 0, 3, 40)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows += [torch.cat([ties, -ties]).repeat(4) * scale for scale in (1.0, 2.0**-20, 2.0**-126, 2.0**10)]
    rows += [torch.zeros(64), -torch.zeros(64), torch.full((64,), 1e-4), torch.full((64,), 1e-45)]
    rows += [torch.full((64,), 448.0), torch.full((64,), 449.0), torch.full((64,), 6.0 * 448), torch.full((64,), 1e30)]
    fp8_ties = torch.tensor([17.0, 19.0, 1.0625, 1.1875, 0.001953125 * 1.5, 448.0, 416.0, 432.0])
    rows += [torch.cat([fp8_ties, -fp8_ties]).repeat(4)]
    return torch.stack(rows)


@pytest.mark.parametrize("kind", FORMATS)
def test_round_trip_equals_the_oracle_bit_for_bit(kind):
    pack, unpack, fake, share = FORMATS[kind]
    x = hostile_values()
    rows = pack(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (len(x), 64 * share)
    assert torch.equal(unpack(rows).view(torch.int32), fake(x).view(torch.int32))


@pytest.mark.parametrize("kind", FORMATS)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_round_trip_of_any_values_equals_the_oracle(kind, values):
    pack, unpack, fake, _ = FORMATS[kind]
    x = torch.tensor(values)
    assert torch.equal(unpack(pack(x)).view(torch.int32), fake(x).view(torch.int32))


@pytest.mark.parametrize("kind", FORMATS)
def test_packing_what_was_unpacked_gives_the_same_bytes(kind):
    pack, unpack, _, _ = FORMATS[kind]
    x = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(3))
    rows = pack(x)
    assert torch.equal(unpack(pack(unpack(rows))), unpack(rows))


@pytest.mark.parametrize("kind", FORMATS)
def test_not_a_number_stays_in_its_row(kind):
    pack, unpack, fake, _ = FORMATS[kind]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    clean = fake(x)
    x[1, 5] = math.nan
    values = unpack(pack(x))
    assert values[1].isnan().any()
    assert torch.equal(values[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", FORMATS)
def test_infinity_is_seen_or_saturates_as_in_the_oracle(kind):
    pack, unpack, fake, _ = FORMATS[kind]
    x = torch.ones(64)
    x[5] = math.inf
    values = unpack(pack(x))
    if kind == "compressed":
        assert values[5] == 448 * 6
    else:
        assert values[5].isnan()
    assert torch.equal(values[32:], fake(torch.ones(32)))


@pytest.mark.parametrize("kind", FORMATS)
def test_strided_input_gives_the_same_bytes(kind):
    pack, unpack, _, _ = FORMATS[kind]
    x = torch.randn(4, 3, 128, generator=torch.Generator().manual_seed(5))
    strided = x[:, :, ::2].transpose(0, 1)
    rows = pack(strided)
    assert torch.equal(rows, pack(strided.contiguous()))
    assert torch.equal(unpack(rows.transpose(0, 1)), unpack(rows).transpose(0, 1))


@pytest.mark.parametrize("kind", FORMATS)
def test_no_rows_give_no_bytes(kind):
    pack, unpack, _, share = FORMATS[kind]
    rows = pack(torch.empty(0, 64))
    assert rows.shape == (0, 64 * share)
    assert unpack(rows).shape == (0, 64)


def test_known_bytes():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 6.0, -0.5, 1.5
    # low nibble first: 6 is code 7, -0.5 is code 9; 1.5 is code 3; zeros are code 0. Scale 1.
    assert quant.pack_index(x).tolist() == [0x97, 0x03] + [0] * 14 + [127]
    # scales e4m3: peak 6 / 6 = 1 is 0x38; a block of zeros gets 2**-9, the smallest e4m3
    assert quant.pack_compressed(x).tolist() == [0x97, 0x03] + [0] * 14 + [0x38, 0x01]
    # 6 / 448 -> scale 2**-6 (byte 121): 6 * 64 = 384 = 1.5 * 2**8 is 0x7C
    assert quant.pack_window(x).tolist()[:3] == [0x7C, 0xE0, 0x6C]
    assert quant.pack_window(x).tolist()[-1] == 121


def test_invalid_compressed_rows_give_zeros_whatever_their_bytes():
    rows = torch.full((2, 3, 36), 0xFF, dtype=torch.uint8)
    rows[0, 1] = quant.pack_compressed(torch.arange(64.0))
    is_valid = torch.zeros(2, 3, dtype=torch.bool)
    is_valid[0, 1] = True
    values = quant.unpack_compressed(rows, is_valid)
    assert torch.equal(values[0, 1], oracle.fake_fp4_latent(torch.arange(64.0)))
    assert not values[~is_valid].any()


def test_activation_rounding_equals_the_oracle_bit_for_bit():
    x = hostile_values()
    assert torch.equal(quant.round_fp8(x).view(torch.int32), oracle.fake_fp8(x).view(torch.int32))


def test_every_stored_matrix_equals_the_oracle():
    known, count = golden.tensors(), 0
    for name, value in known.items():
        scale = known.get(name.removesuffix(".weight") + ".scale")
        if scale is None or name.endswith(".scale"):
            continue
        assert torch.equal(quant.dequantise(Weight(value, scale), torch.float32), oracle.dequantize(value, scale)), name
        count += 1
    assert count == sum(name.endswith(".scale") for name in known) == 305


@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (31, 33), (32, 32), (33, 1), (70, 95), (96, 64)])
def test_partial_tiles_equal_the_oracle(shape):
    random = torch.Generator().manual_seed(6)
    value = torch.randn(*shape, generator=random).to(torch.float8_e4m3fn)
    tiles = (-(-shape[0] // 32), -(-shape[1] // 32))
    scale = torch.randint(100, 140, tiles, dtype=torch.uint8, generator=random).view(torch.float8_e8m0fnu)
    expected = oracle.dequantize(value, scale)
    assert torch.equal(quant.dequantise(Weight(value, scale), torch.float32), expected)
    stacked = Weight(torch.stack([value, value]), torch.stack([scale.view(torch.uint8)] * 2).view(torch.float8_e8m0fnu))
    assert torch.equal(quant.dequantise(stacked, torch.float64), torch.stack([expected, expected]).double())


@pytest.mark.parametrize(("start", "end"), [(0, 32), (32, 70), (64, 65), (0, 70)])
def test_rows_of_a_stored_matrix_equal_rows_of_the_whole(start, end):
    random = torch.Generator().manual_seed(7)
    value = torch.randn(70, 64, generator=random)
    bytes_of = torch.randint(100, 140, (70, 2), dtype=torch.uint8, generator=random).view(torch.float8_e8m0fnu)
    for weight in (
        Weight(value.to(torch.bfloat16)),
        Weight(value.to(torch.float8_e4m3fn), bytes_of[:3].clone()),
        Weight(value.to(torch.float8_e4m3fn), bytes_of),
    ):
        whole = quant.dequantise(weight, torch.float32)
        assert torch.equal(quant.dequantise(quant.weight_rows(weight, start, end), torch.float32), whole[start:end])


def test_scales_that_do_not_fit_are_refused():
    value = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    scale = torch.full((2, 3), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ShapeError, match="do not fit a matrix of 64 x 64"):
        quant.dequantise(Weight(value, scale), torch.float32)
    with pytest.raises(ShapeError, match="multiple of 32"):
        quant.pack_window(torch.zeros(2, 48))
    with pytest.raises(ShapeError, match="multiple of 17"):
        quant.unpack_index(torch.zeros(2, 18, dtype=torch.uint8))
