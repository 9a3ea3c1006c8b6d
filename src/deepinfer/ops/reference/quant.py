"""Number formats: packed cache rows, checkpoint weights, fp8 rounding of activations.

    window row      D bytes e4m3, then D / 32 bytes ue8m0, one scale per 32
    compressed row  D / 2 bytes of two e2m1 codes, then D / 16 bytes e4m3, one scale per 16
    index row       d / 2 bytes of two e2m1 codes, then d / 32 bytes ue8m0, one scale per 32

The low nibble of a byte is the even column. A ue8m0 byte e stands for 2 ** (e - 127), 255 for NaN.
e2m1 and e4m3 round to nearest, ties to the even code. A block of zeros gets the scale of the
floor on its peak: 1e-4 (window and activations), 6 * 2**-9 (compressed), 6 * 2**-126 (index).
Source: architecture page, number formats; OCP Microscaling Formats (MX) v1.0 for e2m1 and ue8m0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.reference.shapes import require
from deepinfer.ops.weights import Weight

FP8_MAX = 448.0
FP4_MAX = 6.0
BLOCK = 32
LATENT_BLOCK = 16
TILE = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Tables:
    """Lookup tables of one device."""

    e4m3: Tensor  # [256] float32
    ue8m0: Tensor  # [256] float32
    e2m1_pairs: Tensor  # [256] int64: the bits of two float32, low nibble first
    e2m1_bounds: Tensor  # [7] float32; a magnitude above bounds[c] has a code above c
    inverse_fp8_max: Tensor  # float32 scalar
    inverse_fp4_max: Tensor  # float32 scalar


@functools.cache
def tables(device: torch.device) -> Tables:
    """The lookup tables on a device, made once."""
    codes = torch.arange(256, dtype=torch.uint8)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), codes.double() - 127).float()
    powers[255] = math.nan
    numbers = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    pairs = torch.stack([numbers[codes.long() & 15], numbers[codes.long() >> 4]], dim=-1)
    value = numbers[:8]
    bounds = (value[1:] + value[:-1]) / 2
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.tensor(0.0))  # a tie below an even code goes up
    made = (codes.view(E4M3).float(), powers, pairs.view(torch.int64).flatten(), bounds)
    inverses = (torch.tensor(1 / FP8_MAX), torch.tensor(1 / FP4_MAX))
    return Tables(*(tensor.to(device) for tensor in made + inverses))


def pack_window(x: Tensor) -> Tensor:
    """[..., D] float32 -> window rows [..., D + D / 32] uint8."""
    codes, exponent, _ = _to_fp8(x)
    return torch.cat([codes.view(torch.uint8).flatten(-2), exponent.squeeze(-1).to(torch.uint8)], dim=-1)


def unpack_window(rows: Tensor) -> Tensor:
    """Window rows [..., D + D / 32] uint8 -> [..., D] float32."""
    require(rows.shape[-1] % 33 == 0, f"a window row has {rows.shape[-1]} bytes; it must be a multiple of 33")
    dim, known = rows.shape[-1] // 33 * 32, tables(rows.device)
    values = _lookup(known.e4m3, rows[..., :dim]).unflatten(-1, (-1, BLOCK))
    return values.mul_(_lookup(known.ue8m0, rows[..., dim:]).unsqueeze(-1)).flatten(-2)


def pack_compressed(x: Tensor) -> Tensor:
    """[..., D] float32 -> compressed rows [..., D / 2 + D / 16] uint8."""
    groups = _blocks(x, LATENT_BLOCK)
    peak = groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-9)
    scale = (peak / FP4_MAX).clamp(max=FP8_MAX).to(E4M3)
    return torch.cat([_e2m1_bytes(groups / scale.float()), scale.view(torch.uint8).squeeze(-1)], dim=-1)


def unpack_compressed(rows: Tensor, is_valid: Tensor | None = None) -> Tensor:
    """Compressed rows [..., D / 2 + D / 16] uint8 -> [..., D] float32; rows that are not valid give zeros.

    is_valid: [...] bool. Whatever bytes an invalid row holds, the result is finite.
    """
    require(rows.shape[-1] % 9 == 0, f"a compressed row has {rows.shape[-1]} bytes; it must be a multiple of 9")
    half, known = rows.shape[-1] // 9 * 8, tables(rows.device)
    scale = _lookup(known.e4m3, rows[..., half:])
    if is_valid is not None:
        scale = scale.masked_fill_(~is_valid.unsqueeze(-1), 0.0)
    values = _lookup(known.e2m1_pairs, rows[..., :half]).view(torch.float32)
    return values.unflatten(-1, (-1, LATENT_BLOCK)).mul_(scale.unsqueeze(-1)).flatten(-2)


def pack_index(x: Tensor) -> Tensor:
    """[..., d] float32 -> index rows [..., d / 2 + d / 32] uint8."""
    groups = _blocks(x, BLOCK)
    peak = groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * 2.0**-126)
    exponent = exponent_at_least(peak * tables(x.device).inverse_fp4_max)
    return torch.cat([_e2m1_bytes(groups / power_of_2(exponent)), exponent.squeeze(-1).to(torch.uint8)], dim=-1)


def unpack_index(rows: Tensor) -> Tensor:
    """Index rows [..., d / 2 + d / 32] uint8 -> [..., d] float32."""
    require(rows.shape[-1] % 17 == 0, f"an index row has {rows.shape[-1]} bytes; it must be a multiple of 17")
    half, known = rows.shape[-1] // 17 * 16, tables(rows.device)
    values = _lookup(known.e2m1_pairs, rows[..., :half]).view(torch.float32).unflatten(-1, (-1, BLOCK))
    return values.mul_(_lookup(known.ue8m0, rows[..., half:]).unsqueeze(-1)).flatten(-2)


def round_fp8(x: Tensor) -> Tensor:
    """Round to e4m3 with one power-of-two scale per 32, and back: [..., D] float32."""
    codes, _, scale = _to_fp8(x)
    return codes.float().mul_(scale).flatten(-2)


def dequantise(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A checkpoint weight with its scales applied, [..., rows, columns] of `dtype`."""
    value, scale = weight.value, weight.scale
    if scale is None:
        return value.to(dtype)
    known = tables(value.device)
    if value.dtype in (torch.int8, torch.uint8):
        numbers = _lookup(known.e2m1_pairs, value.view(torch.uint8)).view(torch.float32)
    else:
        numbers = _lookup(known.e4m3, value.view(torch.uint8))
    factors = _lookup(known.ue8m0, scale.view(torch.uint8))
    rows, columns = numbers.shape[-2:]
    if factors.shape[-2] != rows:
        factors = factors.repeat_interleave(TILE, dim=-2)[..., :rows, :]
    require(
        factors.shape[-2] == rows and factors.shape[-1] == -(-columns // BLOCK),
        f"scales {list(scale.shape)} do not fit a matrix of {rows} x {columns}",
    )
    if columns % BLOCK:
        return numbers.mul_(factors.repeat_interleave(BLOCK, dim=-1)[..., :columns]).to(dtype)
    return numbers.unflatten(-1, (-1, BLOCK)).mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)


def weight_rows(weight: Weight, start: int, end: int) -> Weight:
    """Rows start .. end - 1 of a stored matrix; `start` is a multiple of 32."""
    if weight.scale is None:
        return Weight(weight.value[start:end])
    step = 1 if weight.scale.shape[-2] == weight.value.shape[-2] else TILE
    return Weight(weight.value[start:end], weight.scale[start // step : -(-end // step)])


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 codes [..., blocks, 32], their exponent bytes and their scales, both [..., blocks, 1]."""
    groups = _blocks(x, BLOCK)
    peak = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    exponent = exponent_at_least(peak * tables(x.device).inverse_fp8_max)
    scale = power_of_2(exponent)
    return (groups / scale).to(E4M3), exponent, scale  # at most 448 and a last bit, which rounds to 448


def _e2m1_bytes(groups: Tensor) -> Tensor:
    """Scaled values [..., blocks, n] -> bytes [..., blocks * n / 2] of two e2m1 codes."""
    codes = torch.bucketize(groups.abs().contiguous(), tables(groups.device).e2m1_bounds, out_int32=True)
    codes = codes.add_(groups.signbit(), alpha=8).flatten(-2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def exponent_at_least(x: Tensor) -> Tensor:
    """Exponent byte of the smallest power of two that is at least x, for normal x > 0; 255 for inf and NaN."""
    return ((x.view(torch.int32) - 1) >> 23).add_(1).clamp_(max=255)


def power_of_2(exponent: Tensor) -> Tensor:
    """2 ** (exponent - 127) as float32, for exponents 1 .. 254; inf for 255."""
    return (exponent << 23).view(torch.float32)


def _blocks(x: Tensor, size: int) -> Tensor:
    width = x.shape[-1]
    require(width % size == 0, f"a vector of {width} cannot be packed; its width must be a multiple of {size}")
    return x.unflatten(-1, (-1, size))


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
