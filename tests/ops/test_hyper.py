"""hyper_enter, hyper_leave, hyper_next, embed and head on the oracle's streams."""

from __future__ import annotations

import pytest
import torch
from v41_oracle import Oracle

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import linear
from deepinfer.ops.table import Mix
from ops import golden


def stream_inputs(trace, layer: int):
    """Streams and `pre` that enter a layer's attention half; only layers without an engram."""
    return trace[f"layers.{layer - 1}.output"], trace[f"layers.{layer - 1}.hc_ffn_pre"]


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_attention_half_equals_the_oracle(length, precision):
    trace, ops = golden.trace(length, precision), golden.ops(precision)
    for layer in (2, 3, 5, 6, 7):
        hyper = ops.prepare_hyper(golden.hyper(layer, "attn"), golden.norm(f"layers.{layer}.attn_norm"))
        x, mix = ops.hyper_enter(*stream_inputs(trace, layer), hyper)
        name = f"layers.{layer}"
        # exact: the norm's scale may differ in its last float32 bit, so one value may round to the next bf16
        limit = 1e-3 if precision == "exact" else 5e-7
        assert golden.row_error(x, trace[f"{name}.attn.input"]) <= limit
        assert (x - trace[f"{name}.attn.input"]).abs().gt(1e-5).float().mean() < 1e-3
        assert golden.row_error(mix.pre, trace[f"{name}.hc_attn_pre"]) <= 5e-7
        assert golden.row_error(mix.post, trace[f"{name}.hc_attn_post"]) <= 5e-7
        assert golden.row_error(mix.comb.flatten(1), trace[f"{name}.hc_attn_comb"].flatten(1)) <= 1e-6


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_both_halves_of_a_layer_lead_to_its_output(length, precision):
    trace, ops = golden.trace(length, precision), golden.ops(precision)
    for layer in (2, 3, 5, 6, 7):
        name = f"layers.{layer}"
        streams, _ = stream_inputs(trace, layer)
        parts = ("pre", "post", "comb")
        mixes = {half: Mix(*(trace[f"{name}.hc_{half}_{part}"] for part in parts)) for half in ("attn", "ffn")}
        middle = ops.hyper_leave(streams, trace[f"{name}.attn.output"], mixes["attn"])
        hyper = ops.prepare_hyper(golden.hyper(layer, "ffn"), golden.norm(f"{name}.ffn_norm"))
        x, mix = ops.hyper_enter(middle, mixes["attn"].pre, hyper)
        limit = 1e-3 if precision == "exact" else 5e-7  # a value of the streams may round to the next bf16
        assert golden.row_error(x, trace[f"{name}.ffn.input"]) <= limit
        # exact: such a value moves the mix by up to 2^-9 of one of its 512 terms
        assert golden.row_error(mix.comb.flatten(1), trace[f"{name}.hc_ffn_comb"].flatten(1)) <= max(limit, 1e-6)
        streams = ops.hyper_leave(middle, trace[f"{name}.ffn.output"], mixes["ffn"])
        assert golden.row_error(streams, trace[f"{name}.output"]) <= limit


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_the_next_half_is_entered_as_if_the_one_before_had_been_left(precision):
    ops, trace = golden.ops(precision), golden.trace(33, "float32")
    hyper = ops.prepare_hyper(golden.hyper(5, "ffn"), golden.norm("layers.5.ffn_norm"))
    streams, output = trace["layers.4.output"], trace["layers.5.attn.output"]
    before = Mix(*(trace[f"layers.5.hc_attn_{part}"] for part in ("pre", "post", "comb")))
    left, x, mix = ops.hyper_next(streams, output, before, hyper)
    assert torch.equal(left, ops.hyper_leave(streams, output, before))
    expected, expected_mix = ops.hyper_enter(left, before.pre, hyper)
    assert torch.equal(x, expected) and torch.equal(mix.comb, expected_mix.comb)
    assert torch.equal(mix.pre, expected_mix.pre) and torch.equal(mix.post, expected_mix.post)


def test_comb_is_doubly_stochastic_and_orders_from_before_to():
    ops = golden.ops("fast")
    hyper = ops.prepare_hyper(golden.hyper(0, "attn"), golden.norm("layers.0.attn_norm"))
    streams = torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(0))
    _, mix = ops.hyper_enter(streams, torch.ones(5, 4), hyper)
    assert torch.allclose(mix.comb.sum(1), torch.ones(5, 4), atol=1e-5)
    assert torch.allclose(mix.comb.sum(2), torch.ones(5, 4), atol=0.1)
    one_way = torch.zeros(5, 4, 4)
    one_way[:, 1, 3] = 1.0  # stream 1 goes to stream 3
    moved = ops.hyper_leave(streams, torch.zeros(5, 128), Mix(mix.pre, torch.zeros(5, 4), one_way))
    assert torch.equal(moved[:, 3], streams[:, 1])
    assert not moved[:, :3].any()


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_token_does_not_depend_on_the_tokens_beside_it(precision):
    ops = golden.ops(precision)
    hyper = ops.prepare_hyper(golden.hyper(3, "ffn"), golden.norm("layers.3.ffn_norm"))
    streams = golden.trace(33, precision)["layers.2.output"]
    pre = golden.trace(33, precision)["layers.2.hc_ffn_pre"]
    x, mix = ops.hyper_enter(streams, pre, hyper)
    for token in (0, 7, 32):
        alone_x, alone = ops.hyper_enter(streams[token : token + 1], pre[token : token + 1], hyper)
        assert torch.equal(alone_x[0], x[token])
        assert torch.equal(alone.comb[0], mix.comb[token])
        left = ops.hyper_leave(streams[token : token + 1], alone_x, alone)
        assert torch.equal(left[0], ops.hyper_leave(streams, x, mix)[token])


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_fast_mixes_stay_close_to_the_float32_oracle(tokens):
    trace, ops = golden.trace(33, "float32"), golden.ops("fast")
    hyper = ops.prepare_hyper(golden.hyper(5, "attn"), golden.norm("layers.5.attn_norm"))
    streams, pre = (part[:tokens] for part in stream_inputs(trace, 5))
    x, mix = ops.hyper_enter(streams, pre, hyper)
    for part, name in ((x, "attn.input"), (mix.pre, "hc_attn_pre"), (mix.post, "hc_attn_post")):
        assert golden.row_error(part, trace[f"layers.5.{name}"][:tokens]) <= 1e-6
    # 39 normalisations in float32, sums in another order
    assert golden.row_error(mix.comb.flatten(1), trace["layers.5.hc_attn_comb"][:tokens].flatten(1)) <= 5e-6


def test_streams_are_left_alone_may_be_strided_and_none_may_come():
    ops = golden.ops("fast")
    hyper = ops.prepare_hyper(golden.hyper(0, "attn"), golden.norm("layers.0.attn_norm"))
    streams = torch.randn(6, 8, 128, generator=torch.Generator().manual_seed(1))[:, ::2]
    before, pre = streams.clone(), torch.rand(6, 4)
    x, mix = ops.hyper_enter(streams, pre, hyper)
    assert torch.equal(streams, before)
    assert torch.equal(x, ops.hyper_enter(before, pre, hyper)[0])
    assert torch.equal(ops.hyper_leave(streams, x, mix), ops.hyper_leave(before, x, mix))
    x, mix = ops.hyper_enter(streams[:0], pre[:0], hyper)
    assert (x.shape, mix.comb.shape) == ((0, 128), (0, 4, 4))
    assert ops.hyper_leave(streams[:0], x, mix).shape == (0, 4, 128)
    with pytest.raises(ShapeError, match=r"streams has shape \[6, 3, 128\]"):
        ops.hyper_enter(streams[:, :3], pre, hyper)


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_head_equals_the_oracle_on_traced_streams(precision):
    known = "exact" if precision == "exact" else "float32"
    trace, ops = golden.trace(33, known), golden.ops(precision)
    oracle = Oracle(golden.CHECKPOINT, known)
    expected = trace["final"].double() @ oracle.weights["head.weight"].double().T
    logits = ops.head(trace["layers.7.output"], trace["layers.7.hc_ffn_pre"], ops.prepare_head(golden.head()))
    assert logits.shape == (33, 640)
    assert golden.row_error(logits, expected) <= (1e-3 if precision == "exact" else 1e-6)


def test_a_head_that_stays_bf16_gives_the_same_logits(monkeypatch):
    trace, ops = golden.trace(33, "float32"), golden.ops("float32")
    streams, pre = trace["layers.7.output"], trace["layers.7.hc_ffn_pre"]
    wide = ops.head(streams, pre, ops.prepare_head(golden.head()))
    monkeypatch.setattr(linear, "WIDEN_LIMIT_BYTES", 0)
    stored = ops.prepare_head(golden.head())
    assert stored.matrix.stored.value.dtype == torch.bfloat16
    assert torch.equal(ops.head(streams, pre, stored), wide)


def test_embed_gives_every_stream_the_rows_of_the_table():
    ops, table = golden.ops("fast"), golden.weight("embed")
    embedding = ops.prepare_embedding(table, 3)
    streams, pre = ops.embed(torch.tensor([3, 0, 639, 3]), embedding)
    for stream in range(3):
        assert torch.equal(streams[:, stream], table.value[[3, 0, 639, 3]].float())
    assert pre.tolist() == [[1.0, 0.0, 0.0]] * 4
    assert ops.embed(torch.tensor([], dtype=torch.int64), embedding)[0].shape == (0, 3, 128)
