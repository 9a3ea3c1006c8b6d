"""Packed matrices and panels as numbers, and products of them by torch, for machines without a card."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def pieces(tile: int, step: int):
    """Rows and columns of e4m3 chunks: group, sixteen columns, eight rows, row, byte."""
    group, sixteen, eight, row, byte = torch.meshgrid(*map(torch.arange, (2, 8, 8, 8, 16)), indexing="ij")
    return tile * 128 + group * 64 + eight * 8 + row, step * 128 + sixteen * 16 + byte


def operands(tile: int, step: int):
    """Rows and columns of each thread's registers in a step: group, part, warp, lane, register, byte.

    PTX ISA, wgmma, matrix A of m64k32: lines lane / 4 and 8 on, columns 4 * (lane % 4) and 16 on.
    """
    group, part, warp, lane, register, byte = torch.meshgrid(*map(torch.arange, (2, 4, 4, 32, 4, 4)), indexing="ij")
    row = tile * 128 + group * 64 + warp * 16 + lane // 4 + register % 2 * 8
    return row, step * 128 + part * 32 + register // 2 * 16 + lane % 4 * 4 + byte


def widened(chunks):
    """What the kernel's registers hold of chunks [2, 4352], times 2 ** 5: [group, part, warp, lane, register, byte]."""
    words = chunks[:, :4096].contiguous().view(torch.int32).view(2, 2, 4, 32, 2, 2).long() & 0xFFFFFFFF
    words = words.permute(0, 1, 4, 2, 3, 5).reshape(2, 4, 4, 32, 2)  # group, part, warp, lane, half of the lines
    place = torch.arange(8)
    sizes = words[..., None] >> 4 * place & 7
    signs = words[..., None] >> torch.where(place < 4, 8 * place + 7, 8 * place - 29) & 1
    numbers = E2M1[sizes + 8 * signs].unflatten(-1, (2, 4)).transpose(-3, -2)  # ..., half of a part, half of the lines
    shifts = chunks[:, 4096:].reshape(2, 4, 8, 2, 4).repeat_interleave(4, 2)  # group, warp, lane, half, part
    return (numbers * 2.0 ** (shifts.permute(0, 4, 1, 2, 3)[..., None, :, None] / 8)).flatten(-3, -2)


def panel_bytes(tokens, steps: int):
    """Codes [places, columns] of panels."""
    codes = tokens.codes[: steps * tokens.size * 128].view(steps, tokens.size, 8, 16)
    place, piece = torch.meshgrid(torch.arange(tokens.size), torch.arange(8), indexing="ij")
    return codes[:, place, piece ^ place % 8].permute(1, 0, 2, 3).flatten(1)


def matrices(packed) -> Tensor:
    """What packed matrices hold on the scale of their rows: [experts, padded rows, padded columns] float64."""
    num_experts, tiles, steps, _, chunk = packed.chunks.shape
    whole = torch.empty(num_experts, tiles * 128, steps * 128, dtype=torch.float64)
    for expert, tile, step in torch.cartesian_prod(*map(torch.arange, (num_experts, tiles, steps))).tolist():
        chunks = packed.chunks[expert, tile, step]
        if chunk == 8192:
            numbers = chunks.view(2, 8, 8, 8, 16).contiguous().view(torch.float8_e4m3fn).double()
            whole[expert][pieces(tile, step)] = numbers
        else:
            whole[expert][operands(tile, step)] = widened(chunks).double() / 2**5
    return whole * packed.scale.unsqueeze(-1)


def products(panels, packed, places=None) -> Tensor:
    """As those of `products.py`, rounded once; places that are nobody's are NaN."""
    steps, count = packed.chunks.shape[2], panels.size if places else panels.num_tokens
    codes = panel_bytes(panels, steps).contiguous().view(torch.float8_e4m3fn)
    x, whole = codes.double() * panels.scale[: panels.size, None], matrices(packed)[:, : packed.num_rows]
    if not places and len(whole) > 1:
        groups = x.view(len(whole), -1, x.shape[1])[:, : panels.num_tokens]
        return (groups @ whole.mT).bfloat16()
    if not places:
        return (x[:count] @ whole[0].T).bfloat16()
    out = torch.full((count, packed.num_rows), torch.nan, dtype=torch.bfloat16)
    for expert, (begin, end) in enumerate(zip(places.begins.tolist(), places.ends.tolist(), strict=True)):
        out[begin:end] = (x[begin:end] @ whole[expert].T).bfloat16()
    return out
