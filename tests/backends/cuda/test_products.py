"""Products in CUDA C++: both sides in the order that the kernel reads, then on a card against float64 sums."""

from __future__ import annotations

import types

import pytest
import torch

from backends.cuda import packed as layout
from backends.cuda import pair
from deepinfer.errors import ShapeError

panels = pytest.importorskip("deepinfer.backends.cuda.hopper.panels", reason="triton is not installed")
products = pytest.importorskip("deepinfer.backends.cuda.hopper.products", reason="triton is not installed")
experts = pytest.importorskip("deepinfer.backends.cuda.hopper.experts", reason="triton is not installed")
quant = pytest.importorskip("deepinfer.backends.cuda.hopper.quant", reason="triton is not installed")
linear = pytest.importorskip("deepinfer.backends.cuda.hopper.linear", reason="triton is not installed")
matrices = pytest.importorskip("deepinfer.backends.cuda.hopper.matrices", reason="triton is not installed")


@pytest.mark.parametrize(("rows", "width"), [(128, 128), (300, 384), (5, 96)])
def test_e4m3_chunks_hold_pieces_of_16_columns_of_all_rows(rows, width):
    codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    packed = products.pack_e4m3(codes.view(quant.E4M3), torch.rand(rows))
    padded = torch.nn.functional.pad(codes, (0, -width % 256, 0, -rows % 256))
    assert packed.chunks.shape == (1, len(padded) // 128, padded.shape[1] // 128, 2, 8192)
    for tile in range(packed.chunks.shape[1]):
        for step in range(packed.chunks.shape[2]):
            found = packed.chunks[0, tile, step].view(2, 8, 8, 8, 16)
            assert torch.equal(found, padded[layout.pieces(tile, step)])


def test_matrices_of_several_experts_are_packed_one_after_the_other():
    codes = torch.randint(0, 256, (3, 200, 160), dtype=torch.uint8).view(quant.E4M3)
    packed, scale = products.pack_e4m3(codes, torch.ones(3, 200)), torch.ones(200)
    alone = [products.pack_e4m3(each, scale) for each in codes]
    assert torch.equal(packed.chunks, torch.cat([each.chunks for each in alone]))
    assert torch.equal(packed.scale, torch.cat([each.scale for each in alone])) and packed[2:] == alone[0][2:]


def test_e2m1_chunks_hold_what_each_thread_widens():
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 200, 128), dtype=torch.uint8, generator=random)
    shifts = torch.randint(0, 12, (2, 200, 8), generator=random) * 8
    packed = products.pack_e2m1(experts.Stack(codes, shifts.to(torch.uint8), torch.ones(2, 200), 250))
    assert packed.chunks.shape == (2, 2, 2, 2, 4352) and packed.padded_width == 256
    numbers = layout.E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    numbers = numbers * 2.0 ** (shifts.repeat_interleave(32, -1) / 8)
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, 56))
    for expert in range(2):
        for tile in range(2):
            for step in range(2):
                found = layout.widened(packed.chunks[expert, tile, step])
                assert torch.equal(found, numbers[expert][layout.operands(tile, step)])


@pytest.mark.parametrize(
    ("form", "budget", "words"),
    [
        (products.MOST, 196, "KERNEL(most_e2m1, E2m1, 2)"),
        (products.MANY, 196, "KERNEL(many_e2m1, E2m1, 1)"),
        (products.FEW, 176, "KERNEL(few_e2m1, E2m1, 4)"),
        (products.FEWEST, 176, "KERNEL(fewest_e2m1, E2m1, 1)"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("chunk", [products.E4M3_CHUNK, products.E2M1_CHUNK])
def test_the_sizes_in_python_are_those_of_the_source(form, budget, words, chunk):
    text, groups, tokens = form.source.read_text(), form.rows // 64 // form.cluster, min(128, form.tokens)
    assert words in text and f"TOKENS = {tokens}" in text and f"= {budget} * 1024 / (" in text
    assert form.cluster == 1 or f"GROUPS = {groups}, CLUSTER = {form.cluster}, " in text
    both = (form.source.parent / "products.cuh").read_text()
    assert f"MAX_EXPERTS = {products.MAX_EXPERTS}" in both and "OUT_STRIDE = ROWS * 2 + 16, PIECE = 64" in both
    stage = form.tokens * 128 + groups * chunk
    stages = budget * 1024 // stage
    numbers = stages * 32 + groups * (64 * 144 + tokens * 4) + 4 * (3 * products.MAX_EXPERTS + 1)
    assert stages * stage + numbers <= products.SHARED_BYTES <= 232_448 - 1024
    assert form.threads == groups * 128 + 128


@pytest.mark.parametrize(
    ("rows", "num_tokens", "form"),
    [
        (1792, 512, "fewest"), (1792, 1024, "many"), (5120, 128, "fewest"), (5120, 129, "many"),
        (32768, 64, "few"), (32768, 65, "many"), (32768, 1024, "most"),
    ],
)  # fmt: skip
def test_dense_products_take_the_form_for_their_tiles(rows, num_tokens, form, monkeypatch):
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    matrix = products.Packed(torch.empty(1, rows // 128, 2, 2, 8192, device="meta"), torch.empty(1), rows, 256)
    tokens = panels.Panels(torch.empty(0), torch.empty(0), num_tokens, num_tokens)
    assert products.form_for(matrix, tokens, None).name == form


@pytest.mark.parametrize(
    ("num_tokens", "form"), [(64, "fewest"), (128, "fewest"), (129, "many"), (1024, "many"), (1056, "most")]
)
def test_groups_take_the_form_for_the_tiles_of_all(num_tokens, form, monkeypatch):
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    matrix = products.Packed(torch.empty(8, 8, 32, 2, 8192, device="meta"), torch.empty(1), 1024, 4096)
    tokens = panels.empty_panels(num_tokens, 128, None, torch.device("meta"), 8)
    assert products.form_for(matrix, tokens, None).name == form


@pytest.mark.parametrize(("num_pairs", "form"), [(6, "few"), (288, "few"), (289, "many")])
def test_experts_take_the_form_for_their_pairs(num_pairs, form, monkeypatch):
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    matrix = products.Packed(torch.empty(6, 36, 2, 2, 4352, device="meta"), torch.empty(1), 4608, 256)
    places = panels.Places(torch.empty(num_pairs), torch.empty(6), torch.empty(6), num_pairs + 56)
    tokens = panels.Panels(torch.empty(0), torch.empty(0), places.size, num_pairs)
    assert products.form_for(matrix, tokens, places).name == form


def test_tokens_lie_in_panels():
    x = torch.randn(11, 160, generator=torch.Generator().manual_seed(0)).bfloat16().to(pair.DEVICE)
    tokens, rows = panels.quantise_panels(x, 256), quant.quantise(x)
    found = layout.panel_bytes(tokens, 2)[:11]
    assert torch.equal(found[:, :160], rows.values.view(torch.uint8)) and not found[:, 160:].any()
    assert torch.equal(tokens.scale[:11], rows.scale)


def test_tokens_may_come_in_parts_that_lie_apart():
    x = torch.randn(3, 11, 96, generator=torch.Generator().manual_seed(0)).bfloat16().to(pair.DEVICE)
    apart = x.transpose(0, 1)[:9]
    found, expected = (panels.quantise_panels(each, 512) for each in (apart, apart.flatten(1)))
    assert torch.equal(layout.panel_bytes(found, 4)[:9], layout.panel_bytes(expected, 4)[:9])
    assert torch.equal(found.scale[:9], expected.scale[:9])


def test_pairs_of_an_expert_lie_together_in_their_order():
    chosen = torch.tensor([[2, 0], [2, 3], [0, 2], [2, 0]], dtype=torch.int32, device=pair.DEVICE)
    places = panels.places_of(chosen, 4)
    assert places.begins.tolist() == [0, 16, 24, 32] and places.ends.tolist() == [3, 16, 28, 33]
    assert places.of_pairs.tolist() == [24, 0, 25, 32, 1, 26, 27, 2]
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(pair.DEVICE)
    tokens, rows = panels.quantise_panels(x, 128, places), quant.quantise(x)
    assert tokens.size == 48
    found = layout.panel_bytes(tokens, 1)[places.of_pairs.long()]
    assert torch.equal(found, rows.values.view(torch.uint8).repeat_interleave(2, 0))
    assert torch.equal(tokens.scale[places.of_pairs.long()], rows.scale.repeat_interleave(2))


@pytest.mark.parametrize(
    ("rows", "count", "missing", "can"),
    [(8, 512, "", True), (12, 1, "", False), (8, 513, "", False), (8, 1, "few_e2m1", False), (8, 1, "widen", False)],
)
def test_matrices_are_packed_only_where_every_kernel_takes_them(rows, count, missing, can, monkeypatch):
    monkeypatch.setattr(products, "load", lambda source, name, *given: None if name == missing else name)
    assert products.can_pack(rows, count, torch.device("cuda")) is can
    assert not products.can_pack(rows, count, torch.device("cpu"))


def test_tokens_that_do_not_fit_a_packed_matrix_are_refused():
    codes = torch.zeros(16, 96, dtype=torch.uint8, device=pair.DEVICE).view(quant.E4M3)
    packed = products.pack_e4m3(codes, torch.ones(16, device=pair.DEVICE))
    matrix = matrices.Matrix(packed, True, torch.bfloat16)
    for width in (64, 128):
        with pytest.raises(ShapeError, match=f"x is {width} wide; it must be 96"):
            linear.linear(torch.zeros(2, width, dtype=torch.bfloat16, device=pair.DEVICE), matrix)
    with pytest.raises(ShapeError, match="activations is torch.float32; it must be torch.bfloat16"):
        linear.linear(torch.zeros(2, 96, device=pair.DEVICE), matrix)


@pair.on_device
@pytest.mark.parametrize("form", products.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("rows", "width"), [(200, 384), (1792, 5120), (32, 96)])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 65, 129, 1000, 1300])
def test_dense_products_have_the_bits_of_triton(form, rows, width, num_tokens, monkeypatch):
    monkeypatch.setattr(products, "form_for", lambda *given: form)
    random = torch.Generator(pair.DEVICE).manual_seed(num_tokens)
    x = torch.randn(num_tokens, width, generator=random, device=pair.DEVICE).bfloat16()
    codes = torch.randn(rows, width, generator=random, device=pair.DEVICE).to(quant.E4M3)
    scale = torch.ldexp(torch.ones(rows, device=pair.DEVICE), torch.arange(rows, device=pair.DEVICE) % 5 - 2)
    packed = products.pack_e4m3(codes, scale)
    ours = products.products(panels.quantise_panels(x, packed.padded_width), packed)
    assert torch.equal(ours, linear.matmul(quant.quantise(x), quant.Rows(codes, scale)))


@pair.on_device
@pytest.mark.parametrize("form", products.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_tokens", [1, 7, 60, 300, 1500])
def test_products_of_experts_have_the_bits_of_triton(form, num_tokens, monkeypatch):
    monkeypatch.setattr(products, "form_for", lambda *given: form)
    random = torch.Generator(pair.DEVICE).manual_seed(num_tokens)

    def draw(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=random, device=pair.DEVICE, dtype=torch.uint8)

    scale = torch.ones(40, 328, device=pair.DEVICE)
    stack = experts.Stack(draw(256, 40, 328, 192), draw(12, 40, 328, 12) * 8, scale, 384)
    x = torch.randn(num_tokens, 384, generator=random, device=pair.DEVICE).bfloat16()
    chosen = (draw(40, num_tokens, 3).int() * 7 % 39).sort().values  # some experts have no token
    order, ends = experts.ordered(chosen, 40)
    expected = experts.expert_matmul(quant.quantise(x), stack, order, ends, 3)
    packed, places = products.pack_e2m1(stack), panels.places_of(chosen, 40)
    found = products.products(panels.quantise_panels(x, packed.padded_width, places), packed, places)
    assert torch.equal(found[places.of_pairs.long()], expected)


@pytest.mark.parametrize(
    ("has_copy", "num_pairs", "chosen"),
    [(True, 128, "packed"), (True, 129, "copy"), (True, 4096, "copy"), (False, 4096, "packed"), (False, 4097, "made")],
)
def test_experts_with_many_pairs_are_multiplied_as_e4m3(has_copy, num_pairs, chosen, monkeypatch):
    monkeypatch.setattr(products, "widened", lambda chunks: made)
    made, chunks, copy = torch.ones(1), torch.zeros(3, 2, 2, 2, 4352, dtype=torch.uint8), torch.ones(2)
    matrix = products.Packed(chunks, torch.ones(3, 256), 256, 256, copy if has_copy else None)
    found = products.for_pairs(matrix, num_pairs)
    assert found.chunks is {"packed": chunks, "copy": copy, "made": made}[chosen]
    assert found.scale is matrix.scale


@pytest.mark.parametrize(("num_experts", "num_pairs", "form"), [(1, 4097, "fewest"), (1, 6000, "many")])
def test_forms_that_begin_early_read_no_matrix_widened_just_before(num_experts, num_pairs, form, monkeypatch):
    launched = []
    kernel = types.SimpleNamespace(launch=lambda grid, given: launched.append(given[2]))
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(products, "widened", lambda chunks: made)
    monkeypatch.setattr(products, "kernel_for", lambda chunk, form, device: kernel)
    chunks, made = (torch.empty(num_experts, 2, 2, 2, size, device="meta", dtype=torch.uint8) for size in (4352, 8192))
    matrix = products.Packed(chunks, torch.empty(1), 256, 256)
    places = panels.Places(torch.empty(num_pairs), torch.empty(1), torch.empty(1), num_pairs + 16)
    tokens = panels.Panels(torch.empty(0), torch.empty(0), places.size, num_pairs)
    assert products.form_for(matrix, tokens, places).name == form
    products.products(tokens, matrix, places)
    assert launched[0] is (chunks if form == "fewest" else made)


def test_a_matrix_that_would_be_too_large_is_not_widened_at_use(monkeypatch):
    monkeypatch.setattr(products, "WIDE_BYTES", 2 * 4352)
    matrix = products.Packed(torch.zeros(1, 1, 1, 2, 4352, dtype=torch.uint8), torch.ones(1, 256), 128, 128)
    assert products.for_pairs(matrix, 4096) is matrix


@pair.on_device
@pytest.mark.parametrize("is_kept", [True, False])
def test_widened_matrices_give_the_bits_of_packed_ones(is_kept, monkeypatch):
    codes = torch.randint(0, 256, (3, 304, 128), dtype=torch.uint8, device=pair.DEVICE)
    shifts = (torch.randint(0, 12, (3, 304, 8), device=pair.DEVICE) * 8).to(torch.uint8)
    packed = products.pack_e2m1(experts.Stack(codes, shifts, torch.ones(3, 304, device=pair.DEVICE), 256))
    chosen = torch.arange(300, dtype=torch.int32, device=pair.DEVICE).view(-1, 1) % 3
    places = panels.places_of(chosen, 3)
    tokens = panels.quantise_panels(torch.randn(300, 256, device=pair.DEVICE).bfloat16(), 256, places)
    monkeypatch.setattr(products, "form_for", lambda *given: products.MOST)
    narrow = products.products(tokens, packed, places)
    monkeypatch.setattr(products, "COPY_PAIRS" if is_kept else "WIDE_PAIRS", 0)
    matrix = packed._replace(copy=products.widened(packed.chunks)) if is_kept else packed
    wide = products.products(tokens, matrix, places)
    assert torch.equal(wide[places.of_pairs.long()], narrow[places.of_pairs.long()])
