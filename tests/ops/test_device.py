"""The reference on an accelerator gives what it gives on the CPU; skipped where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.ops.reference import quant, sample
from ops import golden, world
from ops.layers import Layer, Stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# Another order of sums: last bits, and where products round their inputs now and then an fp8 step.
LIMITS = {"exact": 5e-2, "float32": 1e-4, "fast": 5e-2}


def moved(value):
    """Tensors of a weights dataclass, a batch or a list, on the accelerator."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, list):
        return [moved(part) for part in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: moved(getattr(value, name)) for name in names})
    return value


def golden_layers() -> list[Layer]:
    layers, values = [], golden.config()
    for number in range(values["num_hidden_layers"]):
        compressor = golden.compressor(number) if number in values["kv_source_layer_ids"] else None
        indexer = golden.indexer(number) if number in values["index_source_layer_ids"] else None
        layers.append(Layer(golden.attention(number), compressor, indexer, golden.ratio(number)))
    return layers


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_attention_selection_and_caches(precision):
    trace, tables = golden.trace(33, "float32"), world.shuffled_tables({1: 33, 2: 20})
    inputs = [torch.cat([trace[f"layers.{n}.attn.input"]] * 2)[:53] for n in range(8)]
    batch = world.make_batch([(1, 0, 33), (2, 0, 20)], tables=tables)
    sizes = (3, world.num_blocks(tables), world.BLOCK_TOKENS)
    here, there = (Stack(golden.ops(precision), layers, *sizes) for layers in (golden_layers(), moved(golden_layers())))
    there.rings = moved(there.rings)
    there.pages = [pages and tuple(moved(part) for part in pages) for pages in there.pages]
    expected, chosen = here.run(inputs, batch)
    actual, chosen_there = there.run(moved(inputs), moved(batch))
    for number in range(8):
        assert golden.row_error(actual[number].cpu(), expected[number]) <= LIMITS[precision], number
        if chosen[number] is not None:
            same = (chosen_there[number].entries.cpu() == chosen[number].entries).float().mean()
            assert same > 0.98, number


@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_streams_experts_engram_and_head(precision):
    trace, ops = golden.trace(33, "float32"), golden.ops(precision)
    streams, pre = trace["layers.3.output"], trace["layers.3.hc_ffn_pre"]
    rows, is_image = trace["layers.4.engram.rows"].long(), torch.arange(33) % 5 == 0

    def run(place):
        found = ops.engram(place(streams), place(rows), place(is_image), ops.prepare_engram(place(golden.engram(4))))
        hyper = ops.prepare_hyper(place(golden.hyper(4, "ffn")), place(golden.norm("layers.4.ffn_norm")))
        x, mix = ops.hyper_enter(found, place(pre), hyper)
        chosen, share = ops.route(x, place(is_image), ops.prepare_router(place(golden.router(4))))
        routed = ops.experts(x, chosen, share, ops.prepare_experts(place(golden.experts(4))))
        output = ops.shared_expert(x, routed, ops.prepare_shared_expert(place(golden.shared_expert(4))))
        left = ops.hyper_leave(found, output, mix)
        return found, x, chosen, output, left, ops.head(left, mix.pre, ops.prepare_head(place(golden.head())))

    for here, there in zip(run(lambda value: value), run(moved), strict=True):
        assert golden.row_error(there.cpu().flatten(1), here.flatten(1)) <= LIMITS[precision]


def test_packed_bytes_are_equal():
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 100).unsqueeze(1)
    for pack, unpack in (
        (quant.pack_window, quant.unpack_window),
        (quant.pack_compressed, quant.unpack_compressed),
        (quant.pack_index, quant.unpack_index),
    ):
        rows = pack(x)
        assert torch.equal(pack(x.cuda()).cpu(), rows)
        assert torch.equal(unpack(rows.cuda()).cpu(), unpack(rows))


def test_rows_tokens_and_draws_are_equal():
    ops = golden.ops("fast")
    batch, tokens = world.make_batch([(1, 0, 20), (2, 7, 9), (0, 0, 1)]), torch.arange(30) * 17 % 600
    ring = torch.arange(12, dtype=torch.int32).view(3, 4)
    there = ring.cuda()
    expected = ops.ngram_rows(tokens, batch, ring, ops.prepare_ngrams(golden.ngrams()))
    actual = ops.ngram_rows(tokens.cuda(), moved(batch), there, ops.prepare_ngrams(moved(golden.ngrams())))
    assert torch.equal(actual.cpu(), expected)
    ops.store_tokens(tokens, batch, ring)
    ops.store_tokens(tokens.cuda(), moved(batch), there)
    assert torch.equal(there.cpu(), ring)
    logits = torch.randn(500, 1000, generator=torch.Generator().manual_seed(1))
    temperature, seeds, positions = torch.arange(500) % 3 / 2, torch.arange(500), torch.arange(500) % 7
    drawn = ops.draw(logits, temperature, seeds, positions)
    assert torch.equal(ops.draw(logits.cuda(), temperature.cuda(), seeds.cuda(), positions.cuda()).cpu(), drawn)
    assert torch.equal(sample.uniform(seeds.cuda(), positions.cuda(), 99).cpu(), sample.uniform(seeds, positions, 99))
