"""FP8 products on the matrix unit, by CUDA C++ (`native/*products.cu`): packed matrices, and the launch.

A matrix is packed once, in chunks of 64 rows and 128 columns that a bulk copy can bring: e2m1 codes in the order in
which the matrix unit's registers want them, e4m3 ones as it reads them from shared memory too. Results have the bits
of Triton's products (`linear.py`, `experts.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.backends.cuda.hopper.experts import Stack
from deepinfer.backends.cuda.hopper.panels import STEP, TOKEN_TILE, Panels, Places
from deepinfer.backends.cuda.native import Kernel, load, num_multiprocessors
from deepinfer.ops.expert_copies import MAX_EXPERTS, TILE

SOURCE = Path(__file__).parent / "native" / "products.cu"
FEW_SOURCE = SOURCE.with_name("few_products.cu")
E4M3_CHUNK, E2M1_CHUNK = 8192, 4352  # bytes of 64 rows of a step
COPY_PAIRS = 128  # of an expert, above which e4m3 takes less time than e2m1
WIDE_PAIRS, WIDE_BYTES = 4096, 1 << 30  # above which e4m3 is worth making, if not kept, in as many bytes at most


class Form(NamedTuple):
    """One of the forms of the kernel: tiles of rows, of a cluster, and tokens, and its launch."""

    name: str
    source: Path
    rows: int
    tokens: int
    threads: int
    cluster: int


MOST = Form("most", SOURCE, 256, TOKEN_TILE, 384, 2)
MANY = Form("many", SOURCE, 256, 128, 384, 2)
FEW = Form("few", FEW_SOURCE, 256, 64, 640, 1)
FEWEST = Form("fewest", FEW_SOURCE, 64, 64, 256, 1)
FORMS = (MOST, MANY, FEW, FEWEST)
SHARED_BYTES = 222 * 1024


class Packed(NamedTuple):
    """One matrix or one of every expert.

    chunks [E, padded rows / 128, steps, 2, chunk] uint8. scale [E, padded rows] float32. Rows and columns are padded
    to multiples of 256; width: columns before. copy: the chunks of e2m1 once more as e4m3, None = not kept.
    """

    chunks: Tensor
    scale: Tensor
    num_rows: int
    width: int
    copy: Tensor | None = None

    @property
    def padded_width(self) -> int:
        """Columns of all steps."""
        return self.chunks.shape[2] * STEP


def can_pack(num_rows: int, num_experts: int, device: torch.device) -> bool:
    """Whether the kernel takes matrices of this many rows, and all that they may need can be built for the device."""
    if num_rows % 8 or num_experts > MAX_EXPERTS or device.type != "cuda":
        return False
    kernels = [kernel_for(chunk, form, device) for chunk in (E4M3_CHUNK, E2M1_CHUNK) for form in FORMS]
    return None not in (*kernels, widening_for(device))


def kernel_for(chunk: int, form: Form, device: torch.device) -> Kernel | None:
    """The kernel for chunks of this many bytes; None where it cannot be built."""
    name = f"{form.name}_{'e4m3' if chunk == E4M3_CHUNK else 'e2m1'}"
    return load(form.source, name, form.threads, SHARED_BYTES, device.index or 0)


def widening_for(device: torch.device) -> Kernel | None:
    """The kernel that widens chunks; None where it cannot be built."""
    return load(SOURCE, "widen", 128, 0, device.index or 0)


def pack_e4m3(codes: Tensor, scale: Tensor) -> Packed:
    """codes [rows, width] e4m3 and the scale of each row [rows], or of every expert [E, rows, width] and [E, rows]."""
    num_rows, width = codes.shape[-2:]
    codes = F.pad(codes.view(torch.uint8), (0, -width % TILE, 0, -num_rows % TILE))
    tiles, steps = codes.shape[-2] // 128, codes.shape[-1] // STEP
    # Rows: tile, group, eight, line; columns: step, sixteen, byte.
    parts = codes.view(-1, tiles, 2, 8, 8, steps, 8, 16)
    chunks = parts.permute(0, 1, 5, 2, 6, 3, 4, 7).reshape(-1, tiles, steps, 2, E4M3_CHUNK)
    return Packed(chunks, F.pad(scale, (0, -num_rows % TILE)).view(len(chunks), -1), num_rows, width)


def pack_e2m1(stack: Stack) -> Packed:
    """Matrices of experts, one after the other."""
    (codes, shifts, num_rows), packed = (stack.codes, stack.shifts, stack.num_rows), []
    for own_codes, own_shifts in zip(codes, shifts, strict=True):
        padding = 0, -num_rows % TILE
        rows = F.pad(own_codes, (0, -codes.shape[2] % (TILE // 2), *padding))
        numbers = torch.stack([rows & 15, rows >> 4], -1).flatten(-2)
        parts = numbers.view(-1, 2, 4, 2, 8, rows.shape[1] * 2 // STEP, 2, 2, 2, 4, 4)
        # To tile, step, group, half of a step | warp, line, four | part, half of the lines | half of a part, byte.
        parts = parts.permute(0, 5, 1, 6, 2, 4, 9, 7, 3, 8, 10).flatten(-2).int()
        words = torch.zeros(parts.shape[:-1], dtype=torch.int64, device=codes.device)
        for place in range(8):
            number = parts[..., place].long()
            sign = 8 * place + 7 if place < 4 else 8 * (place - 4) + 3
            words |= (number & 7) << 4 * place | (number >> 3) << sign
        words = words.to(torch.int32).view(torch.uint8).reshape(len(rows) // 128, -1, 2, 4096)
        groups = F.pad(own_shifts, (0, -shifts.shape[2] % (TILE // 32), *padding)).view(
            -1, 2, 4, 2, 8, words.shape[1], 4
        )
        groups = groups.permute(0, 5, 1, 2, 4, 3, 6).reshape(len(rows) // 128, -1, 2, 256)
        packed.append(torch.cat([words, groups], -1))
    return Packed(torch.stack(packed), F.pad(stack.scale, (0, -num_rows % TILE)), num_rows, stack.width)


def products(panels: Panels, matrix: Packed, places: Places | None = None) -> Tensor:
    """Tokens times the matrix, [tokens, rows] bf16; with places times each one's expert's, [places, rows].

    Of several experts without places, each with as many tokens: [experts, tokens, rows], those of an expert dense. The
    form for few tokens reads matrix and places before the kernel before it has ended: another one, such as
    that of `quantise_panels`, must lie between it and what wrote these.
    """
    num_experts, _, steps, _, _ = matrix.chunks.shape
    device, num_tokens = matrix.chunks.device, panels.num_tokens
    shape = (panels.size,) if places else (num_experts, panels.size // num_experts)
    out = torch.empty(*shape, matrix.num_rows, dtype=torch.bfloat16, device=device)
    if not places:
        out = out[:, :num_tokens] if num_experts > 1 else out[0, :num_tokens]
    if not num_tokens:
        return out
    blocks, form = num_multiprocessors(device), form_for(matrix, panels, places)
    if places and form.source == SOURCE:  # the others would read what is widened at use too early
        matrix = for_pairs(matrix, len(places.of_pairs) / num_experts)
    kernel = kernel_for(matrix.chunks.shape[-1], form, device)
    assert kernel is not None, "matrices are packed only where the kernel is"
    begins, ends = (places.begins, places.ends) if places else (None, None)
    kernel.launch(
        (min(blocks, num_tiles(form, matrix, panels, places) * form.cluster), 1, 1),
        (panels.codes, panels.scale, matrix.chunks, matrix.scale, out, begins, ends, num_experts, num_tokens,
         panels.size, matrix.num_rows, steps),
    )  # fmt: skip
    return out


def for_pairs(matrix: Packed, num_pairs: float) -> Packed:
    """Experts in the format whose products take the least time with as many pairs each; their bits are the same."""
    if matrix.copy is not None:
        return matrix._replace(chunks=matrix.copy) if num_pairs > COPY_PAIRS else matrix
    is_worth_it = num_pairs > WIDE_PAIRS and 2 * matrix.chunks.numel() <= WIDE_BYTES
    return matrix._replace(chunks=widened(matrix.chunks)) if is_worth_it else matrix


def widened(chunks: Tensor) -> Tensor:
    """The same numbers as e4m3."""
    shape, kernel = chunks.shape[:-1], widening_for(chunks.device)
    assert kernel is not None, "matrices are packed only where the kernel is"
    wide = torch.empty(*shape, E4M3_CHUNK, dtype=torch.uint8, device=chunks.device)
    kernel.launch((math.prod(shape), 1, 1), (chunks, wide))
    return wide


def form_for(matrix: Packed, panels: Panels, places: Places | None) -> Form:
    """The fastest form; results are the same. Experts get unequal numbers of pairs, so few are fewer of them."""
    blocks = num_multiprocessors(matrix.chunks.device)
    if 4 * num_tiles(MANY, matrix, panels, places) <= blocks:
        return FEWEST
    num_experts = len(matrix.chunks)
    pairs = len(places.of_pairs) if places else panels.num_tokens * num_experts
    if 4 * pairs <= 3 * FEW.tokens * num_experts if places else panels.num_tokens <= FEW.tokens:
        return FEW
    return MOST if pairs // MOST.tokens * -(-matrix.num_rows // MOST.rows) >= blocks else MANY


def num_tiles(form: Form, matrix: Packed, panels: Panels, places: Places | None) -> int:
    """Tiles that there are at most."""
    num_experts = len(matrix.chunks)
    if places:
        of_tokens = len(places.of_pairs) // form.tokens + num_experts
    else:
        of_tokens = -(-panels.num_tokens // form.tokens) * num_experts
    return -(-matrix.num_rows // form.rows) * of_tokens
