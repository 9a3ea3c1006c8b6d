"""The attention's ops against the reference, and the same bits however tokens are put together."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from backends.cpu.pair import random_weight
from backends.cpu.test_attention import make_world
from backends.cuda import packed as layout
from backends.cuda import pair
from backends.cuda.test_attended import rounded
from deepinfer.errors import ShapeError
from deepinfer.ops import values
from deepinfer.ops.weights import Weight
from ops import golden, world

pytest.importorskip("triton", reason="triton is not installed")
from deepinfer.backends.cuda.hopper import attention, panels, products, projections  # noqa: E402

LIMIT = 6e-3  # shares and results are bf16, against the peak of other tiles


def run(made, arguments, prepared=None) -> torch.Tensor:
    ops = pair.hopper()
    q, *others = arguments
    prepared = prepared or ops.prepare_attention(pair.placed(made.weights))
    return heads(ops.attend(pair.narrow(q), *map(pair.placed, others), prepared))


def heads(found: torch.Tensor | values.Attended) -> torch.Tensor:
    return pair.wide(found.heads() if isinstance(found, values.Attended) else found)


def rounding_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """By how much numbers [T, h, D] are further off than their rounding to e4m3 by groups of 8 heads explains."""
    groups = exact.unflatten(1, (-1, 8))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax((2, 3), keepdim=True) / 448)))
    half_step = torch.maximum(groups.abs() / 16, scale * 2.0**-10)
    excess = ((found.unflatten(1, (-1, 8)) - groups).abs() - half_step).clamp_min(0)
    return float((excess.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max())


def expected(made, arguments) -> torch.Tensor:
    ops = pair.reference()
    return ops.attend(arguments[0].bfloat16().float(), *arguments[1:], ops.prepare_attention(made.weights))


@pytest.mark.parametrize(
    ("shape", "stretches"),
    [
        (dict(heads=8, dim=128, rope=32, window=128, ratio=1, top_k=128), [(1, 299, 1), (2, 3, 1), (0, 0, 1)]),
        (dict(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8), [(1, 15, 3), (2, 0, 0)]),
        (dict(heads=13, dim=160, rope=2, window=70, ratio=4, top_k=37), [(1, 40, 2), (2, 60, 1)]),
        (dict(heads=1, dim=96, rope=96, window=1, ratio=5, top_k=1), [(1, 297, 3)]),
        (dict(heads=70, dim=512, rope=64, window=5, ratio=2, top_k=9), [(1, 290, 1)]),
    ],
    ids=["nano", "golden", "odd", "narrow", "wide"],
)
def test_result_equals_the_reference(shape, stretches):
    made = make_world(**shape)
    arguments = made.step(stretches, made.weights.window + 2)
    assert golden.row_error(run(made, arguments), expected(made, arguments)) <= LIMIT


RELEASED = dict(heads=64, dim=512, rope=64, window=128, ratio=2, top_k=130)


def make_released(**changes):
    """A world whose wo_a is e4m3, for groups of eight heads."""
    made = make_world(**{**RELEASED, **changes})
    groups = made.weights.num_heads // 8
    codes = torch.randn(groups * 16, 4096, generator=torch.Generator().manual_seed(7)).to(torch.float8_e4m3fn)
    exponents = torch.full((groups // 2, 128), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wo_b = random_weight(64, groups * 16, seed=8)
    weights = dataclasses.replace(made.weights, wo_a=Weight(codes, exponents), wo_b=wo_b, num_groups=groups)
    return dataclasses.replace(made, weights=weights)


@pair.on_device
@pytest.mark.parametrize(
    ("changes", "stretches", "ring_length"),
    [
        ({}, [(1, 299, 1), (2, 3, 2), (0, 0, 1)], 132),
        ({"heads": 128, "rope": 128, "window": 70}, [(1, 200, 90), (2, 60, 1)], 69),
        ({"window": 5, "ratio": 4, "top_k": 3}, [(1, 0, 7), (2, 12, 40)], 8),
    ],
    ids=["decode", "prefill", "few"],
)
def test_the_kernel_of_released_sizes_equals_the_reference_and_the_general_one(
    changes, stretches, ring_length, monkeypatch
):
    made = make_released(**changes)
    arguments = made.step(stretches, ring_length)
    actual = run(made, arguments)
    assert rounding_error(actual, expected(made, arguments)) <= LIMIT
    monkeypatch.setattr("deepinfer.backends.cuda.hopper.attention.wide_kernels", lambda *_: None)
    assert rounding_error(actual, run(made, arguments)) <= LIMIT


@pair.on_device
def test_the_kernel_of_released_sizes_gives_a_row_the_same_bits_alone_and_in_a_batch():
    made = make_released()
    prepared = pair.hopper().prepare_attention(pair.placed(made.weights))
    stretches = [(1, 280, 4), (2, 10, 40), (1, 120, 100)]
    together = run(made, made.step(stretches[:2], 132), prepared)
    alone = torch.cat([run(made, made.step([stretch], 132), prepared) for stretch in stretches[:2]])
    assert torch.equal(together, alone)
    token_by_token = [run(made, made.step([(2, 10 + index, 1)], 132), prepared) for index in range(40)]
    assert torch.equal(together[4:], torch.cat(token_by_token))


@pair.on_device
@pytest.mark.parametrize("num_heads", [64, 192])
def test_blocks_that_take_many_tokens_in_turn_give_each_the_bits_it_has_alone(num_heads):
    made = make_released(heads=num_heads)
    prepared = pair.hopper().prepare_attention(pair.placed(made.weights))
    arguments = made.step([(1, 0, 300), (2, 0, 61)], 132)
    together = run(made, arguments, prepared)
    assert rounding_error(together, expected(made, arguments)) <= LIMIT
    for position in (0, 1, 131, 132, 290, 299):
        alone = run(made, made.step([(1, position, 1)], 132), prepared)
        assert torch.equal(together[position : position + 1], alone)


@pair.on_device
def test_tiles_of_which_a_token_sees_nothing_are_left_out_and_places_found_once_for_layers_with_one_selection():
    made = make_released()
    prepared = pair.hopper().prepare_attention(pair.placed(made.weights))
    q, rows, batch, ring, pages, entries = made.step([(1, 0, 300), (2, 60, 1)], 132)
    entries[:, 20:] = -1
    entries[200:210, 127] = 0
    q, rows, batch, ring, pages, entries = pair.placed([q.bfloat16(), rows, batch, ring, pages, entries])
    together = heads(pair.hopper().attend(q, rows, batch, ring, pages, entries, prepared))
    tiles = next(found[2][1] for key, found in batch.derived.items() if key[0] == "places of keys")
    window = (torch.tensor([*range(300), 60]).clamp_max(127) + 64) // 64
    entry = (torch.tensor([*range(300), 60]) > 0).int()
    entry[200:210] = 2
    assert torch.equal(tiles.cpu(), torch.stack([window, window + entry], 1).int())

    other_rows = rows.flip(0)  # another layer's
    shared = heads(pair.hopper().attend(q, other_rows, batch, ring, pages, entries, prepared))
    assert sum(key[0] == "places of keys" for key in batch.derived) == 1
    fresh = dataclasses.replace(batch)
    assert torch.equal(shared, heads(pair.hopper().attend(q, other_rows, fresh, ring, pages, entries, prepared)))
    assert not torch.equal(shared, together)
    pair.hopper().attend(q, rows, batch, ring, pages, entries.clone(), prepared)
    assert sum(key[0] == "places of keys" for key in batch.derived) == 1  # of the newest selection alone
    again = heads(pair.hopper().attend(q, rows, batch, ring, pages, entries, prepared))
    assert torch.equal(again, together)
    pair.hopper().attend(q, rows, batch, ring, None, None, prepared)
    assert sum(key[0] == "places of keys" for key in batch.derived) == 2


def test_places_are_kept_for_the_newest_selection_and_the_caches_that_they_count_in(monkeypatch):
    launched = []
    kernels = [types.SimpleNamespace(launch=lambda grid, given, name=name: launched.append(name)) for name in "PA"]
    monkeypatch.setattr(attention, "wide_kernels", lambda *given: kernels)
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: 132)
    made = make_world(**RELEASED)
    prepared = pair.hopper().prepare_attention(made.weights)
    q, rows, batch, ring, pages, entries = made.step([(1, 0, 3)], 132)
    selections = [entries.clone() for _ in range(3)]

    def attend(entries: torch.Tensor | None, ring: torch.Tensor = ring) -> str:
        launched.clear()
        attention.attend(q.bfloat16(), rows, batch, ring, None if entries is None else pages, entries, prepared)
        return "".join(launched)

    def kept() -> list[bool]:
        return [any(found[0] is entries for found in batch.derived.values()) for entries in selections]

    found = [attend(entries) for entries in (selections[0], selections[0], None, selections[0])]
    assert found == ["PA", "A", "PA", "A"]
    assert kept() == [True, False, False]
    assert [attend(entries) for entries in (selections[1], None, selections[2])] == ["PA", "A", "PA"]
    assert kept() == [False, False, True]
    apart = torch.zeros(len(ring), ring.shape[1] + 1, ring.shape[2], dtype=ring.dtype)[:, :-1]
    assert [attend(selections[2], apart), attend(selections[2], apart), attend(selections[2])] == ["PA", "A", "PA"]


@pair.on_device
@pytest.mark.parametrize("turns", [0, 790, 7000])
def test_results_at_late_positions_are_turned_back_as_in_the_reference(turns):
    """The kernel takes cosines of angles above 105,615 another way."""
    made = make_released()
    q, rows, batch, ring, _, _ = made.step([(1, 200, 5), (2, 40, 3)], 132)
    later = turns * ring.shape[1]
    batch = dataclasses.replace(
        batch,
        positions=batch.positions + later,
        row_starts=batch.row_starts + later,
        window_starts=torch.full_like(batch.window_starts, later),
        max_position=batch.max_position + later,
    )
    arguments = q, rows, batch, ring, None, None
    assert rounding_error(run(made, arguments), expected(made, arguments)) <= LIMIT


@pair.on_device
def test_large_and_small_scales_of_packed_rows_stay_exact():
    made = make_released()
    q, rows, batch, ring, _, _ = made.step([(1, 299, 1)], 132)
    for exponent in (-20, 20, 60):
        scaled, scaled_ring = rows.clone(), ring.clone()
        scaled[:, 512:] += exponent % 256
        scaled_ring[..., 512:] += exponent % 256
        arguments = q * 2.0**-exponent, scaled, batch, scaled_ring, None, None
        assert rounding_error(run(made, arguments), expected(made, arguments)) <= LIMIT


def test_late_window_starts_and_layers_without_entries_equal_the_reference():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8)
    for starts in ([0, 0], [285, 20]):
        q, rows, batch, ring, _, _ = made.step([(1, 285, 3), (2, 20, 2)], 17, window_starts=starts)
        arguments = q, rows, batch, ring, None, None
        assert golden.row_error(run(made, arguments), expected(made, arguments)) <= LIMIT


def test_entries_that_do_not_exist_count_as_none():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8)
    q, rows, batch, ring, pages, entries = made.step([(1, 290, 2)], 17)
    hostile = torch.tensor([-1, -(2**31), 2**31 - 1, 10**6, 360], dtype=torch.int32).expand(2, -1)
    spoiled = torch.cat([entries, hostile], dim=1)
    assert torch.equal(
        run(made, (q, rows, batch, ring, pages, spoiled)), run(made, (q, rows, batch, ring, pages, entries))
    )


@pair.on_device
def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=70)
    prepared = pair.hopper().prepare_attention(pair.placed(made.weights))
    together = run(made, made.step([(1, 280, 2), (2, 10, 1)], 17), prepared)
    for offset, stretch in ((0, (1, 280, 2)), (2, (2, 10, 1))):
        alone = run(made, made.step([stretch], 17), prepared)
        assert torch.equal(together[offset : offset + stretch[2]], alone)


def test_store_window_equals_the_reference_and_leaves_padding_alone():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8)
    for stretches in ([(1, 5, 30)], [(1, 250, 3), (0, 0, 2), (2, 0, 7)], [(2, 60, 0)]):
        for length in (16, 3):
            _, rows, batch, _, _, _ = made.step(stretches, 16)
            rings = [world.poisoned(3, length, 66) for _ in range(2)]
            pair.reference().store_window(rows, batch, rings[0])
            there = pair.placed(rings[1])
            pair.hopper().store_window(pair.placed(rows), pair.placed(batch), there)
            assert torch.equal(rings[0], there.cpu())


def test_inputs_and_output_equal_the_reference():
    trace, weights = golden.trace(33, "exact"), golden.attention(1)
    x, positions = trace["layers.1.attn.input"][:7].bfloat16(), torch.arange(7, dtype=torch.int32) * 4000
    ours, theirs = pair.hopper(), pair.reference()
    prepared, expected_prepared = ours.prepare_attention(pair.placed(weights)), theirs.prepare_attention(weights)
    low, q, rows = ours.attention_inputs(pair.narrow(x), pair.placed(positions), prepared)
    for actual, wanted in zip(
        (low, q, rows), theirs.attention_inputs(x.float(), positions, expected_prepared), strict=True
    ):
        if wanted.is_floating_point():  # a last bit may round the low-rank query to fp8 the other way
            assert golden.row_error(pair.wide(actual).flatten(1), wanted.flatten(1)) <= 2e-2
        else:
            assert float((actual.cpu() == wanted).float().mean()) >= 0.98
    attended = torch.randn(7, weights.num_groups, 256 // weights.num_groups, generator=torch.Generator().manual_seed(2))
    codes, scale = rounded(attended.bfloat16())
    numbers = (codes.float() * scale.unsqueeze(-1)).view(7, 4, 64)
    actual = ours.project_out(pair.narrow(attended).view(7, 4, 64), prepared)
    assert golden.row_error(pair.wide(actual), theirs.project_out(numbers, expected_prepared)) <= 2e-2


@pair.on_device
def test_attention_of_released_sizes_gives_project_out_what_its_heads_give():
    made, ops = make_released(), pair.hopper()
    prepared = ops.prepare_attention(pair.placed(made.weights))
    q, *others = made.step([(1, 280, 4), (2, 10, 40)], 132)
    attended = ops.attend(pair.narrow(q), *map(pair.placed, others), prepared)
    assert isinstance(attended, values.Attended)
    assert torch.equal(ops.project_out(attended, prepared), ops.project_out(attended.heads(), prepared))


@pair.on_device
@pytest.mark.parametrize("changes", [{"num_groups": 4}, {"wo_a": random_weight(128, 4096, seed=9)}], ids=list)
def test_heads_that_the_next_product_wants_otherwise_are_not_rounded_by_attention(changes):
    made = make_released()
    made = dataclasses.replace(made, weights=dataclasses.replace(made.weights, **changes))
    q, *others = made.step([(1, 20, 3)], 132)
    prepared = pair.hopper().prepare_attention(pair.placed(made.weights))
    assert isinstance(pair.hopper().attend(pair.narrow(q), *map(pair.placed, others), prepared), torch.Tensor)


def test_the_low_rank_query_is_rounded_for_its_product_as_by_itself():
    """In the panels that a packed wq_b wants."""
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8)
    attention = pair.hopper().prepare_attention(pair.placed(made.weights))
    packed = products.pack_e4m3(torch.zeros(16, attention.wq_b.rows.values.shape[1], dtype=torch.uint8), torch.ones(16))
    attention = dataclasses.replace(attention, wq_b=attention.wq_b._replace(rows=packed))
    x = pair.narrow(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)))
    low, ours, _ = projections._split_down(x, pair.placed(torch.arange(7, dtype=torch.int32)), attention)
    alone = panels.quantise_panels(low, packed.padded_width)
    steps = packed.chunks.shape[2]
    assert torch.equal(layout.panel_bytes(ours, steps)[:7], layout.panel_bytes(alone, steps)[:7])
    assert torch.equal(ours.scale[:7], alone.scale[:7])


def test_wrong_shapes_are_refused_by_name():
    made = make_world(heads=4, dim=64, rope=32, window=16, ratio=2, top_k=8)
    q, rows, batch, ring, pages, entries = pair.placed(list(made.step([(1, 290, 2)], 17)))
    ops, q = pair.hopper(), q.bfloat16()
    prepared = ops.prepare_attention(pair.placed(made.weights))
    for match, arguments in (
        ("q is torch.float32", (q.float(), rows, batch, ring, pages, entries)),
        ("ring holds 8 positions; it must hold 15", (q, rows, batch, ring[:, :8], pages, entries)),
        ("together", (q, rows, batch, ring, pages, None)),
        ("entries is torch.int64", (q, rows, batch, ring, pages, entries.long())),
    ):
        with pytest.raises(ShapeError, match=match):
            ops.attend(*arguments, prepared)
