"""attention_inputs, attend, store_window, project_out (with compress and select as they feed attend)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import attention as reference
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.numerics import Numerics
from ops import golden, world
from ops.layers import Layer, Stack


def golden_layers() -> list[Layer]:
    layers, values = [], golden.config()
    for number in range(values["num_hidden_layers"]):
        compressor = golden.compressor(number) if number in values["kv_source_layer_ids"] else None
        indexer = golden.indexer(number) if number in values["index_source_layer_ids"] else None
        layers.append(Layer(golden.attention(number), compressor, indexer, golden.ratio(number)))
    return layers


def golden_stack(precision: str, tables: dict[int, list[int]], num_slots: int = 2) -> Stack:
    return Stack(golden.ops(precision), golden_layers(), num_slots, world.num_blocks(tables), world.BLOCK_TOKENS)


def run_chunks(stack: Stack, inputs, tables, slot: int, size: int):
    """All outputs and entries of one request, in chunks."""
    length = inputs[0].shape[0]
    outputs, entries = [[] for _ in inputs], [[] for _ in inputs]
    for start, count in world.chunks(length, size):
        batch = world.make_batch([(slot, start, count)], tables=tables)
        parts, selections = stack.run([x[start : start + count] for x in inputs], batch)
        for number, (part, selection) in enumerate(zip(parts, selections, strict=True)):
            outputs[number].append(part)
            if selection is not None:
                entries[number].extend(set(row) - {-1} for row in selection.entries.tolist())
    return [torch.cat(parts) for parts in outputs], entries


def golden_inputs(trace) -> list[torch.Tensor]:
    return [trace[f"layers.{n}.attn.input"] for n in range(golden.config()["num_hidden_layers"])]


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_attention_of_every_layer_equals_the_oracle(length, precision):
    trace, tables = golden.trace(length, precision), world.shuffled_tables({1: length})
    stack = golden_stack(precision, tables)
    outputs, entries = run_chunks(stack, golden_inputs(trace), tables, slot=1, size=length)
    for number, layer in enumerate(stack.layers):
        name = f"layers.{number}.attn"
        if layer.indexer is not None:
            chosen = [set(row) - {-1} for row in trace[f"{name}.indexer.chosen"].tolist()]
            assert entries[number] == chosen, number
        expected = trace[f"{name}.output"]
        if precision == "float32":
            assert golden.row_error(outputs[number], expected) <= 2e-6, number
            continue
        # Attention sums are float32, and their order may be another than where the traces were made: then
        # one value of a row may round to the next bf16, then to the next fp8 before wo_b (a step of 1/16).
        # All other rows are equal bit for bit.
        is_equal = (outputs[number] == expected).all(-1)
        assert (~is_equal).sum() <= 1, number
        assert golden.row_error(outputs[number], expected) <= 1e-2, number


@pytest.mark.parametrize("num_keys", [5, 64, 150])
def test_folded_softmax_equals_the_oracle(num_keys):
    random = torch.Generator().manual_seed(num_keys)
    q, kv = torch.randn(40, 4, 64, generator=random), torch.randn(200, 64, generator=random)
    slots = torch.randint(-1, 200, (40, num_keys), generator=random)
    sink = torch.randn(4, generator=random)
    expected = oracle.Oracle(golden.CHECKPOINT, "exact").sparse_attention(q, kv, slots, sink)
    actual = reference._folded_softmax(Numerics.of("exact"), q, kv[slots.clamp_min(0)], slots < 0, sink)
    # shares and results round to bf16; where two orders of a float32 sum lie on two sides of a tie, one step
    assert golden.row_error(actual, expected) <= 2e-3
    assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_window_rows_equal_the_oracle_bit_for_bit(length, precision):
    trace, ops = golden.trace(length, precision), golden.ops(precision)
    for number, x in enumerate(golden_inputs(trace)):
        attention = ops.prepare_attention(golden.attention(number))
        rows = ops.attention_inputs(x, torch.arange(length, dtype=torch.int32), attention)[2]
        assert torch.equal(quant.unpack_window(rows), trace[f"layers.{number}.attn.window_kv"]), number


@pytest.mark.parametrize(
    ("length", "precision", "size"),
    [(33, "float32", size) for size in (1, 2, 3, 7, 16)] + [(33, "exact", 3), (200, "exact", 16)],
)
def test_chunks_give_what_one_pass_gives(length, precision, size):
    inputs, tables = golden_inputs(golden.trace(length, precision)), world.shuffled_tables({1: length})
    whole, chosen = run_chunks(golden_stack(precision, tables), inputs, tables, slot=1, size=length)
    parts, chosen_in_parts = run_chunks(golden_stack(precision, tables), inputs, tables, slot=1, size=size)
    assert chosen_in_parts == chosen
    for number, (part, expected) in enumerate(zip(parts, whole, strict=True)):
        if precision == "float32":  # attention sums of another shape differ in their last bits
            assert golden.row_error(part, expected) <= 1e-6, number
        else:  # such a bit may move one value to the next bf16, and fp8: as in the test above
            assert (part == expected).float().mean() > 0.999, number
            assert golden.row_error(part, expected) <= 1e-2, number


@pytest.mark.parametrize("precision", ["float32", "fast"])
def test_rows_of_mixed_length_give_what_each_gives_alone(precision):
    inputs = golden_inputs(golden.trace(33, "float32"))
    lengths = {1: 33, 2: 1, 3: 17, 4: 8, 5: 30}
    tables = world.shuffled_tables(lengths)
    together = golden_stack(precision, tables, num_slots=6)
    done = dict.fromkeys(lengths, 0)
    outputs = {slot: [[] for _ in inputs] for slot in lengths}
    for step in ([3, 1, 1, 8, 12], [1, 0, 9, 0, 18], [29, 0, 7, 0, 0]):
        stretches = [(slot, done[slot], count) for slot, count in zip(lengths, step, strict=True)]
        stretches.append((0, 0, 1))  # a padding row
        joined = [torch.cat([x[start : start + count] for _, start, count in stretches]) for x in inputs]
        parts, _ = together.run(joined, world.make_batch(stretches, tables=tables))
        offset = 0
        for slot, _, count in stretches[:-1]:
            for number, part in enumerate(parts):
                outputs[slot][number].append(part[offset : offset + count])
            offset += count
            done[slot] += count
    assert done == lengths
    for slot, length in lengths.items():
        alone_inputs = [x[:length] for x in inputs]
        alone, _ = run_chunks(golden_stack(precision, tables, num_slots=6), alone_inputs, tables, slot, length)
        for number, expected in enumerate(alone):
            actual = torch.cat(outputs[slot][number])
            # attention sums (in fast: all sums) of another shape differ in their last bits
            assert golden.row_error(actual, expected) <= (1e-5 if precision == "fast" else 1e-6), (slot, number)


def test_padding_slot_and_block_are_never_written():
    inputs, tables = golden_inputs(golden.trace(33, "float32")), world.shuffled_tables({1: 33})
    stack = golden_stack("float32", tables)
    stretches = [(0, 0, 5), (1, 0, 20), (0, 0, 2)]
    rows = torch.cat([torch.arange(5), torch.arange(20), torch.arange(2)])
    stack.run([x[rows] for x in inputs], world.make_batch(stretches, tables=tables))
    caches = stack.rings + [cache for pages in stack.pages if pages for cache in pages if cache is not None]
    assert all(not cache[0].any() for cache in caches)
    assert all(cache[1:].any() for cache in caches)


def test_bytes_that_no_request_owns_change_nothing():
    inputs, tables = golden_inputs(golden.trace(33, "float32")), world.shuffled_tables({1: 33})
    results = []
    for fill in (0x00, 0x7F, 0xFF):
        stack = golden_stack("float32", tables)
        for cache in stack.rings + [cache for pages in stack.pages if pages for cache in pages if cache is not None]:
            cache.view(torch.uint8)[:] = fill  # padding included
        results.append(run_chunks(stack, inputs, tables, slot=1, size=7)[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(results[0], other, strict=True))


def test_tiles_of_tokens_change_nothing(monkeypatch):
    inputs, tables = golden_inputs(golden.trace(33, "float32")), world.shuffled_tables({1: 33, 2: 20})
    stretches = [(1, 0, 33), (2, 0, 0), (2, 0, 20)]
    joined = [torch.cat([x, x[:20]]) for x in inputs]
    whole, _ = golden_stack("float32", tables, 3).run(joined, world.make_batch(stretches, tables=tables))
    monkeypatch.setattr("deepinfer.ops.reference.attention.TILE_BYTES", 5 * 32 * 64 * 4)
    tiled, _ = golden_stack("float32", tables, 3).run(joined, world.make_batch(stretches, tables=tables))
    assert all(golden.row_error(a, b) <= 1e-6 for a, b in zip(tiled, whole, strict=True))


def test_window_starts_hide_older_positions():
    ops, attention = golden.ops("float32"), golden.ops("float32").prepare_attention(golden.attention(0))
    x = golden.trace(33, "float32")["layers.0.attn.input"]
    batch = world.make_batch([(1, 0, 33)])
    _, q, rows = ops.attention_inputs(x, batch.positions, attention)
    ring = world.poisoned(2, 16, 66)
    late = world.make_batch([(1, 20, 13)], window_starts=[20])
    attended = ops.attend(q[20:], rows[20:], late, ring, None, None, attention)
    assert attended.isfinite().all()
    # the first late token sees itself alone, as the token at position 0 would: value * share beside the sink
    vector = quant.unpack_window(rows[20:21]).double()
    score = (q[20].double() @ vector.T).squeeze(-1) * 64**-0.5
    share = torch.sigmoid(score - golden.attention(0).sink.value.double())
    expected = share.unsqueeze(-1) * vector
    assert torch.allclose(attended[0, :, :32].double(), expected[:, :32], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("window", [1, 2, 5, 70, 129])
@pytest.mark.parametrize("precision", ["exact", "float32", "fast"])
def test_any_window_equals_plain_attention(window, precision):
    ops = golden.ops(precision)
    weights = dataclasses.replace(golden.attention(0), window=window)
    attention = ops.prepare_attention(weights)
    length, start = 150, 140
    random = torch.Generator().manual_seed(window)
    x = torch.randn(length, 128, generator=random)
    ring = world.poisoned(2, window + 3, 66)
    first, second = world.make_batch([(1, 0, start)]), world.make_batch([(1, start, length - start)])
    _, _, old_rows = ops.attention_inputs(x[:start], first.positions, attention)
    ops.store_window(old_rows, first, ring)
    _, q, rows = ops.attention_inputs(x[start:], second.positions, attention)
    attended = ops.attend(q, rows, second, ring, None, None, attention)

    keys = quant.unpack_window(torch.cat([old_rows, rows])).double()
    position = torch.arange(start, length).unsqueeze(1)
    other = torch.arange(length)
    hidden = (other > position) | (other <= position - window)
    scores = torch.einsum("shd,kd->shk", q.double(), keys) * 64**-0.5
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    sink = weights.sink.value.double().view(1, -1, 1).expand(len(q), -1, 1)
    plain = torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ keys
    turned = plain.float()
    expected = _rotate_back(turned, position.squeeze(1))
    # exact: bf16 shares and outputs, half a step each
    assert golden.row_error(attended, expected) <= (4e-3 if precision == "exact" else 2e-6)


def _rotate_back(x, positions):
    steps = torch.arange(0, 32, 2, dtype=torch.float32) / 32
    return oracle.rotate(x, torch.outer(positions.float(), 1.0 / (10000**steps)), inverse=True)


def test_no_tokens_give_no_rows():
    ops, attention = golden.ops("exact"), golden.ops("exact").prepare_attention(golden.attention(1))
    batch = world.make_batch([(1, 7, 0)])
    low_rank, q, rows = ops.attention_inputs(torch.empty(0, 128), batch.positions, attention)
    assert (low_rank.shape, q.shape, rows.shape) == ((0, 64), (0, 4, 64), (0, 66))
    ring = world.poisoned(2, 16, 66)
    pages, entries = world.poisoned(2, 60, 36), torch.empty(0, 0, dtype=torch.int32)
    attended = ops.attend(q, rows, batch, ring, pages, entries, attention)
    ops.store_window(rows, batch, ring)
    assert ops.project_out(attended, attention).shape == (0, 128)


def test_inputs_are_left_alone_and_may_be_strided():
    ops, attention = golden.ops("float32"), golden.ops("float32").prepare_attention(golden.attention(0))
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1))[:, ::2]
    before, positions = x.clone(), torch.arange(9, dtype=torch.int32)
    strided = ops.attention_inputs(x, positions, attention)
    dense = ops.attention_inputs(x.contiguous(), positions, attention)
    assert torch.equal(x, before)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    batch, ring = world.make_batch([(1, 0, 9)]), torch.zeros(2, 16, 132, dtype=torch.uint8)[..., ::2]
    _, q, rows = dense
    q_before = q.clone()
    attended = ops.attend(q, rows, batch, ring, None, None, attention)
    assert torch.equal(q, q_before)
    by_head = torch.stack(attended.unbind(1), 0).transpose(0, 1)
    assert torch.equal(ops.project_out(by_head, attention), ops.project_out(attended, attention))


def test_store_window_keeps_the_latest_rows_of_a_long_chunk():
    batch = world.make_batch([(2, 5, 40), (1, 0, 3)])
    rows = torch.arange(43, dtype=torch.uint8).unsqueeze(1).expand(-1, 66).contiguous()
    ring = torch.zeros(3, 16, 66, dtype=torch.uint8)
    golden.ops("fast").store_window(rows, batch, ring)
    expected = [0] * 16
    for index in range(40):
        expected[(5 + index) % 16] = index
    assert ring[2, :, 0].tolist() == expected
    assert ring[1, :, 0].tolist() == [40, 41, 42] + [0] * 13
    assert not ring[0].any()


def test_wrong_shapes_are_refused_by_name():
    ops, attention = golden.ops("fast"), golden.ops("fast").prepare_attention(golden.attention(0))
    batch, rows = world.make_batch([(1, 0, 2)]), torch.zeros(2, 66, dtype=torch.uint8)
    q, ring = torch.zeros(2, 4, 64), torch.zeros(2, 16, 66, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="q has shape"):
        ops.attend(q[:1], rows, batch, ring, None, None, attention)
    with pytest.raises(ShapeError, match="ring holds 8 positions; it must hold 15"):
        ops.attend(q, rows, batch, ring[:, :8], None, None, attention)
    with pytest.raises(ShapeError, match="together"):
        ops.attend(q, rows, batch, ring, None, torch.zeros(2, 1, dtype=torch.int32), attention)
    with pytest.raises(ShapeError, match="x is torch.float64"):
        ops.attention_inputs(torch.zeros(2, 128).double(), batch.positions, attention)
