"""Products: widened and stored matrices, input rounding, independence of the batch."""

from __future__ import annotations

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ConfigError, ShapeError
from deepinfer.ops.reference import linear
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.weights import Weight
from ops import golden


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_quantised_product_equals_the_oracle(precision):
    numerics, weight = Numerics.of(precision), golden.weight("layers.0.attn.wq_b")
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    reference = oracle.Oracle(golden.CHECKPOINT, precision)
    actual = linear.linear(numerics, x, linear.prepare_linear(numerics, weight))
    assert torch.equal(actual, reference.linear(x, "layers.0.attn.wq_b"))


@pytest.mark.parametrize("name", ["head", "layers.0.attn.wq_b", "layers.0.ffn.experts.0.w2"])
def test_a_matrix_that_stays_stored_gives_the_same_product(monkeypatch, name):
    numerics, weight = Numerics.of("exact"), golden.weight(name)
    wide = linear.prepare_linear(numerics, weight)
    monkeypatch.setattr(linear, "WIDEN_LIMIT_BYTES", 0)
    monkeypatch.setattr(linear, "SLICE_BYTES", 50 * linear.num_columns(weight) * 8)
    stored = linear.prepare_linear(numerics, weight)
    assert stored.wide is None and wide.stored is None
    x = torch.randn(3, linear.num_columns(weight), generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear.multiply(numerics, x, stored), linear.multiply(numerics, x, wide))


def test_stacked_matrices_give_both_products():
    numerics = Numerics.of("float32")
    first, second = golden.weight("layers.0.attn.wq_a"), golden.weight("layers.0.attn.wkv")
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    both = linear.multiply(numerics, x, linear.prepare_linear(numerics, first, second))
    parts = [linear.multiply(numerics, x, linear.prepare_linear(numerics, weight)) for weight in (first, second)]
    assert torch.equal(both, torch.cat(parts, -1))
    with pytest.raises(ShapeError, match="all be quantised, or none"):
        linear.prepare_linear(numerics, first, Weight(torch.zeros(4, 128)))


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_row_does_not_depend_on_the_rows_beside_it(precision):
    numerics = Numerics.of(precision)
    matrix = linear.prepare_linear(numerics, golden.weight("layers.0.attn.wq_a"))
    x = torch.randn(65, 128, generator=torch.Generator().manual_seed(3))
    together = linear.linear(numerics, x, matrix)
    assert torch.equal(together, torch.cat([linear.linear(numerics, row, matrix) for row in x.split(1)]))


def test_wide_bytes_counts_two_columns_a_byte_in_fp4():
    numerics = Numerics.of("fast")
    assert linear.wide_bytes(numerics, golden.experts(0).w1) == 8 * 64 * 128 * 4
    assert linear.wide_bytes(numerics, golden.weight("head")) == 640 * 128 * 4


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="'half'; it must be exact, float32 or fast"):
        Numerics.of("half")
