"""Grouped products in CUDA C++: matrices in the order that the kernel reads, then on a card the bits of bf16 ones."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import pair
from deepinfer.ops.reference import quant
from deepinfer.ops.weights import Weight

grouped = pytest.importorskip("deepinfer.backends.cuda.hopper.grouped", reason="triton is not installed")
linear = pytest.importorskip("deepinfer.backends.cuda.hopper.linear", reason="triton is not installed")


def draw(rows: int, width: int, least: int = 100, most: int = 130) -> Weight:
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=random)
    codes[codes & 127 == 127] = 0  # not a number
    scale = torch.randint(least, most + 1, (rows // 32, width // 32), dtype=torch.uint8, generator=random)
    scale[0, :2] = torch.tensor([least, most])
    codes, scale = codes.to(pair.DEVICE), scale.to(pair.DEVICE)
    return Weight(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def registers(chunks):
    """What threads make of chunks [tiles, steps, bytes]: [tile, step, part, thread, i, even or odd, half]."""
    words = chunks[..., :8192].contiguous().view(torch.int32).view(*chunks.shape[:2], 4, 128, 4).long()
    numbers = torch.stack(
        [words << 4 & 0x07F007F0 | words << 8 & 0x80008000, words >> 4 & 0x07F007F0 | words & 0x80008000], -1
    )
    numbers = torch.stack([numbers, numbers >> 16], -1).to(torch.int16).view(torch.bfloat16)
    factors = chunks[..., 8192:].contiguous().view(torch.bfloat16).view(*chunks.shape[:2], 2, 4, 2)
    assert torch.equal(factors[..., 0], factors[..., 1])
    factors = factors[..., 0].repeat_interleave(64, 2).transpose(2, 3)  # tile, step, part, thread
    return numbers * factors[..., None, None, None]


@pytest.mark.parametrize(("least", "most"), [(100, 130), (grouped.LEAST, grouped.MOST)])
def test_chunks_become_what_each_thread_multiplies(least, most, monkeypatch):
    monkeypatch.setattr(grouped, "kernel_for", lambda device: "kernel")
    weight = draw(256, 512, least, most)
    packed = grouped.pack_grouped(weight, 2)
    assert packed.num_groups == 2 and packed.chunks.shape == (4, 4, 8192 + 32)
    found = registers(packed.chunks.cpu())
    tile, step, part, thread, i, odd, half = torch.meshgrid(*map(torch.arange, found.shape), indexing="ij")
    row = tile * 64 + thread // 32 * 16 + thread % 32 // 4 + odd * 8  # PTX ISA, wgmma, matrix A of m64k16
    column = step * 128 + part * 32 + i * 8 + thread % 4 * 2 + half
    assert torch.equal(found, quant.dequantise(weight, torch.bfloat16).cpu()[row, column])


@pytest.mark.parametrize(
    "weight",
    [
        Weight(torch.zeros(128, 256, dtype=torch.bfloat16)),
        draw(128, 128), draw(64, 256), draw(128, 256, grouped.LEAST - 1), draw(128, 256, 100, grouped.MOST + 1),
    ],
    ids=["not e4m3", "half a pair of steps", "half a tile", "numbers below bf16's", "factors beyond bf16's"],
)  # fmt: skip
def test_other_matrices_are_not_packed(weight, monkeypatch):
    monkeypatch.setattr(grouped, "kernel_for", lambda device: "kernel")
    assert grouped.pack_grouped(weight, 2) is None


def test_nothing_is_packed_without_the_kernel(monkeypatch):
    monkeypatch.setattr(grouped, "load", lambda *given: None)
    assert grouped.pack_grouped(draw(128, 256), 2) is None


def test_the_sizes_in_python_are_those_of_the_source():
    text = grouped.SOURCE.read_text()
    assert f"TOKENS = {grouped.TOKENS}, CHUNK = {grouped.CODE_BYTES} + 32" in text and "= 200 * 1024 / (" in text
    stage = grouped.TOKENS * 256 + grouped.CODE_BYTES + 32
    stages = 200 * 1024 // stage
    assert stages * (stage + 16) + grouped.TOKENS * (144 + 4) <= grouped.SHARED_BYTES <= 232_448 - 1024
    assert "__launch_bounds__(3 * GROUP, 1)" in text and grouped.THREADS == 3 * 128


@pair.on_device
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 33, 64, 65, 300])
def test_products_have_the_bits_of_bf16_matrices(num_tokens):
    weight = draw(256, 512)
    x = torch.randn(
        num_tokens, 1024, generator=torch.Generator(pair.DEVICE).manual_seed(num_tokens), device=pair.DEVICE
    )
    wide = quant.dequantise(weight, torch.bfloat16).unflatten(0, (2, -1))
    expected = linear.grouped_matmul(x.bfloat16(), wide)
    assert torch.equal(grouped.grouped_products(x.bfloat16(), grouped.pack_grouped(weight, 2)), expected)
