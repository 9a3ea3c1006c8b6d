"""ngram_rows and engram."""

from __future__ import annotations

import pytest
import torch
import v41_oracle as oracle

from deepinfer.errors import ShapeError
from ops import golden, world


def rows_in_chunks(tokens: list[int], size: int, length: int, image_token: int = -1) -> torch.Tensor:
    ops = golden.ops("fast")
    ngrams = ops.prepare_ngrams(golden.ngrams(image_token))
    ring, parts = torch.full((3, length), -7, dtype=torch.int32), []
    for start, count in world.chunks(len(tokens), size):
        batch = world.make_batch([(0, 0, 1), (2, start, count)])
        step = torch.tensor([5] + tokens[start : start + count])
        parts.append(ops.ngram_rows(step, batch, ring, ngrams)[:, 1:])
        ops.store_tokens(step, batch, ring)
    return torch.cat(parts, dim=1)


def oracle_rows(tokens: list[int], is_text: list[bool]) -> torch.Tensor:
    config = oracle.Config.load(golden.CHECKPOINT)
    return oracle.NgramHash(config, golden.CHECKPOINT).rows(tokens, is_text).transpose(0, 1)


@pytest.mark.parametrize("length", [33, 200])
def test_rows_equal_the_trace(length):
    tokens = golden.goldens()["prompts"][str(length)]["tokens"]
    rows = rows_in_chunks(tokens, size=length, length=4)
    for index, layer in enumerate((1, 4)):
        assert torch.equal(rows[index], golden.trace(length, "exact")[f"layers.{layer}.engram.rows"].long())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 60])
@pytest.mark.parametrize("length", [3, 5])
def test_chunks_and_images_equal_the_oracle(size, length):
    random = torch.Generator().manual_seed(size)
    tokens = torch.randint(0, 630, (60,), generator=random).tolist()
    for position in (0, 9, 10, 11, 30, 32, 59):
        tokens[position] = 639
    rows = rows_in_chunks(tokens, size, length, image_token=639)
    assert torch.equal(rows, oracle_rows(tokens, [token != 639 for token in tokens]))


def test_rows_stay_inside_their_tables():
    rows = rows_in_chunks(torch.randint(0, 640, (300,), generator=torch.Generator().manual_seed(1)).tolist(), 300, 4)
    for layer, size in zip(rows, golden.config()["engram_num_embeddings"], strict=True):
        assert int(layer.min()) >= 0
        assert int(layer.max()) < size


@pytest.mark.parametrize(("length", "precision"), golden.TRACES)
def test_engram_update_equals_the_oracle(length, precision):
    trace, ops = golden.trace(length, precision), golden.ops(precision)
    model = oracle.Oracle(golden.CHECKPOINT, precision)
    is_text = torch.ones(length, dtype=torch.bool)
    for layer in (1, 4):
        streams, rows = trace[f"layers.{layer - 1}.output"], trace[f"layers.{layer}.engram.rows"].long()
        expected = model.engram(layer, streams, rows, is_text)
        actual = ops.engram(streams, rows, None, ops.prepare_engram(golden.engram(layer)))
        # exact: bf16 of sums that differ in their last float32 bit
        assert golden.row_error(actual, expected) <= (1e-3 if precision == "exact" else 5e-7)
        assert golden.row_error(actual, streams) > 0.05


def test_the_update_leads_to_the_traced_input_of_its_layer():
    trace, ops = golden.trace(33, "float32"), golden.ops("float32")
    streams = trace["layers.3.output"]
    streams = ops.engram(streams, trace["layers.4.engram.rows"].long(), None, ops.prepare_engram(golden.engram(4)))
    hyper = ops.prepare_hyper(golden.hyper(4, "attn"), golden.norm("layers.4.attn_norm"))
    x, _ = ops.hyper_enter(streams, trace["layers.3.hc_ffn_pre"], hyper)
    assert golden.row_error(x, trace["layers.4.attn.input"]) <= 1e-6


def test_image_tokens_pass_unchanged():
    ops = golden.ops("exact")
    engram = ops.prepare_engram(golden.engram(1))
    streams = oracle.bf16(torch.randn(4, 4, 128, generator=torch.Generator().manual_seed(2)))
    rows = torch.arange(24).view(4, 6)
    is_image = torch.tensor([True, False, True, False])
    actual, without = ops.engram(streams, rows, is_image, engram), ops.engram(streams, rows, None, engram)
    assert torch.equal(actual[is_image], streams[is_image])
    assert torch.equal(actual[~is_image], without[~is_image])
    assert not torch.equal(without[is_image], streams[is_image])


def test_the_table_is_not_copied_and_no_tokens_give_no_rows():
    ops, weights = golden.ops("fast"), golden.engram(1)
    engram = ops.prepare_engram(weights)
    assert engram.table.value.data_ptr() == weights.table.value.data_ptr()
    empty = ops.engram(torch.empty(0, 4, 128), torch.empty(0, 6, dtype=torch.int64), None, engram)
    assert empty.shape == (0, 4, 128)
    ngrams, ring = ops.prepare_ngrams(golden.ngrams()), torch.zeros(2, 4, dtype=torch.int32)
    batch = world.make_batch([(1, 5, 0)])
    assert ops.ngram_rows(torch.empty(0, dtype=torch.int64), batch, ring, ngrams).shape == (2, 0, 6)
    with pytest.raises(ShapeError, match="token ring holds 2 tokens; it must hold 3"):
        ops.ngram_rows(torch.empty(0, dtype=torch.int64), batch, ring[:, :2], ngrams)


def test_store_tokens_keeps_the_latest_and_leaves_padding_alone():
    ops, ring = golden.ops("fast"), torch.full((3, 4), -1, dtype=torch.int32)
    batch = world.make_batch([(0, 0, 2), (2, 3, 7), (1, 6, 1)])
    ops.store_tokens(torch.arange(10), batch, ring)
    # positions 6, 7, 8, 9 hold tokens 5, 6, 7, 8
    assert ring.tolist() == [[-1] * 4, [-1, -1, 9, -1], [7, 8, 5, 6]]
