"""Attended heads rounded to e4m3 for the grouped product: one power-of-two scale a token and group of heads.

The scale is that of the group's largest number, once rounded to bf16. e4m3 keeps all its bits over 14 octaves, so
scales of 32 numbers, as other activations have, would change next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import INVERSE_FP8_MAX, e4m3_bytes, exponent_above, power
from deepinfer.backends.cuda.hopper.panels import STEP, Panels, empty_panels, write_panels
from deepinfer.backends.cuda.hopper.quant import E4M3, Rows
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.values import Attended


@dataclass(frozen=True)
class AttendedPanels(Attended):
    """Heads [T, h, dim] in panels of `num_groups` groups, whose columns fill all steps."""

    panels: Panels
    num_groups: int
    num_heads: int
    dim: int

    def heads(self) -> Tensor:
        """[T, h, D] bf16, which holds these numbers exactly."""
        codes, scale, size, num_tokens = self.panels
        width = self.num_heads * self.dim // self.num_groups
        lines = codes[: size * width].view(width // STEP, self.num_groups, -1, 8, 16)
        token, piece = torch.meshgrid(*(torch.arange(n, device=codes.device) for n in (num_tokens, 8)), indexing="ij")
        groups = lines[:, :, token, piece ^ token % 8].permute(2, 1, 0, 3, 4).flatten(2).view(E4M3)
        scale = scale[:size].view(self.num_groups, -1)[:, :num_tokens].T.unsqueeze(-1)
        return (groups.to(torch.bfloat16) * scale.to(torch.bfloat16)).reshape(num_tokens, self.num_heads, self.dim)


def empty_attended(num_tokens: int, num_groups: int, num_heads: int, dim: int, device: torch.device) -> AttendedPanels:
    """Panels for these tokens, not filled."""
    panels = empty_panels(num_tokens, num_heads * dim // num_groups, None, device, num_groups)
    return AttendedPanels(panels, num_groups, num_heads, dim)


@triton.jit
def round_group_kernel(x, codes, scale, stride, size, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """A token's numbers of one group, to panels of `size` places where PADDED is their width; `stride`: of a group."""
    begin()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = x + (token * tl.num_programs(1) + group) * WIDTH + column
    values = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
    exponent = exponent_above(tl.maximum(tl.max(tl.abs(values)), 1e-4) * INVERSE_FP8_MAX)
    rounded, place = e4m3_bytes(values * power(254 - tl.minimum(exponent, 253))), group * stride + token
    if PADDED:
        write_panels(codes, scale, place, size, rounded, power(exponent), PADDED, TILE // 32)
    else:
        tl.store(codes + place * WIDTH + column, rounded, mask=column < WIDTH)
        tl.store(scale + place, power(exponent))


def group_panels(x: Tensor, padded_width: int) -> Panels:
    """x [n, groups, width] bf16, dense -> e4m3 panels of the groups."""
    panels = empty_panels(len(x), padded_width, None, x.device, x.shape[1])
    _launch(x, panels.codes, panels.scale, panels.size // x.shape[1], panels.size, padded_width)
    return panels


def group_rows(x: Tensor) -> Rows:
    """x [n, groups, width] bf16, dense -> e4m3 rows [groups, n, width] with scale [groups, n]."""
    num_rows, num_groups, width = x.shape
    codes = torch.empty(num_groups, num_rows, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(num_groups, num_rows, device=x.device)
    _launch(x, codes, scale, num_rows, 0, 0)
    return Rows(codes.view(E4M3), scale)


def _launch(x: Tensor, codes: Tensor, scale: Tensor, stride: int, size: int, padded_width: int) -> None:
    num_rows, num_groups, width = x.shape
    if num_rows:
        tile = next_power_of_2(max(width, padded_width, 32))
        round_group_kernel[(num_rows, num_groups)](
            x, codes, scale, stride, size, width, padded_width, tile, num_warps=4, launch_pdl=True
        )
