"""The engram against the reference, on the golden model's tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backends.cuda import packed, pair
from ops import golden, world

engram = pytest.importorskip("deepinfer.backends.cuda.hopper.engram", reason="triton is not installed")
panels = pytest.importorskip("deepinfer.backends.cuda.hopper.panels", reason="triton is not installed")


def test_streams_equal_the_reference_and_images_pass():
    trace, weights = golden.trace(33, "exact"), golden.engram(4)
    streams, rows = trace["layers.3.output"][:9], trace["layers.4.engram.rows"].long()[:9]
    is_image = torch.arange(9) % 4 == 1
    ours, theirs = pair.hopper(), pair.reference()
    prepared, expected_prepared = ours.prepare_engram(pair.placed(weights)), theirs.prepare_engram(weights)
    for images in (None, is_image):
        given = None if images is None else pair.placed(images)
        actual = pair.wide(ours.engram(pair.narrow(streams), pair.placed(rows), given, prepared))
        expected = theirs.engram(streams, rows, images, expected_prepared)
        assert golden.row_error(actual.flatten(1), expected.flatten(1)) <= 4e-3  # bf16 results
        if images is not None:
            assert torch.equal(actual[is_image], streams[is_image])


def test_panels_of_table_rows_are_those_of_the_rows_in_bf16():
    prepared = pair.hopper().prepare_engram(pair.placed(golden.engram(4)))
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(len(prepared.codes), (11, 6), generator=random)
    rows[0], rows[1, 2], rows[2, 5] = -1, -1, len(prepared.codes)
    values = engram.gathered(pair.placed(rows), prepared)
    is_nonzero = values.view(11, 6, -1).any(-1).cpu()
    assert torch.equal(is_nonzero, (rows >= 0) & (rows < len(prepared.codes)))
    ours = engram.gathered_panels(pair.placed(rows), prepared, 512)
    expected = panels.quantise_panels(values, 512)
    assert torch.equal(packed.panel_bytes(ours, 4)[:11], packed.panel_bytes(expected, 4)[:11])
    assert torch.equal(ours.scale[:11], expected.scale[:11])


def test_no_tokens_give_no_rows():
    ops = pair.hopper()
    prepared = ops.prepare_engram(pair.placed(golden.engram(4)))
    empty = torch.empty(0, 4, 128, dtype=torch.bfloat16, device=pair.DEVICE)
    rows = torch.empty(0, 6, dtype=torch.int64, device=pair.DEVICE)
    assert ops.engram(empty, rows, None, prepared).shape == (0, 4, 128)


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 0, 40, 2], [70, 3]])
def test_rows_of_ngrams_are_the_reference_s(length, counts):
    random = torch.Generator().manual_seed(len(counts))
    stretches = [(slot, start, count) for slot, (start, count) in enumerate(zip((0, 2, 31, 1), counts, strict=False))]
    batch = world.make_batch(stretches)
    tokens = torch.randint(0, 640, (sum(counts),), generator=random)
    tokens[::7] = 639  # an image
    ring = torch.randint(0, 640, (6, length + 2), generator=random, dtype=torch.int32)[:, :length]
    ours, theirs = pair.hopper(), pair.reference()
    spec = golden.ngrams(image_token=639)
    found = ours.ngram_rows(
        pair.placed(tokens), pair.placed(batch), pair.placed(ring), ours.prepare_ngrams(pair.placed(spec))
    )
    assert torch.equal(found.cpu(), theirs.ngram_rows(tokens, batch, ring, theirs.prepare_ngrams(spec)))
    empty = world.make_batch([(1, 0, 0)])
    assert ours.ngram_rows(
        pair.placed(tokens[:0]), pair.placed(empty), pair.placed(ring), ours.prepare_ngrams(pair.placed(spec))
    ).shape == (2, 0, 6)


def test_ids_that_the_token_map_does_not_hold_count_as_padding():
    ours, theirs, spec = pair.hopper(), pair.reference(), golden.ngrams(image_token=639)
    batch, num_ids = world.make_batch([(1, 2, 5)]), len(spec.token_map)
    longer = dataclasses.replace(spec, token_map=torch.cat([spec.token_map, torch.tensor([spec.pad])]))
    tokens, ring = torch.tensor([1, num_ids, 2, 3, num_ids]), torch.full((3, 5), num_ids, dtype=torch.int32)
    expected = theirs.ngram_rows(tokens, batch, ring, theirs.prepare_ngrams(longer))
    for bad in (num_ids, 2**31 - 1, -1, -(2**31)):
        given = [pair.placed(torch.where(ids == num_ids, bad, ids)) for ids in (tokens, ring)]
        prepared = ours.prepare_ngrams(pair.placed(spec))
        assert torch.equal(ours.ngram_rows(given[0], pair.placed(batch), given[1], prepared).cpu(), expected)
