"""SwiGLU between two products of an expert, rounded for the second: to rows, or to panels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.numbers import power, sigmoid, to_bf16
from deepinfer.backends.cuda.hopper.panels import Panels, Places, empty_panels, write_panels
from deepinfer.backends.cuda.hopper.quant import E4M3, Rows, on_scale, rounded_groups
from deepinfer.backends.cuda.hopper.sizes import cdiv, two_powers_of_2


@triton.jit
def activated(
    both, line, factor, limit, FIRST: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr, HAS_LIMIT: tl.constexpr
):  # fmt: skip
    """factor * silu(gate) * up of a line's groups from FIRST on, clamped, rounded to bf16: [GROUPS, 32] float32."""
    column = (FIRST + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_here = column < INNER
    gate = tl.load(both + line * 2 * INNER + column, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(both + line * 2 * INNER + INNER + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, tl.PropagateNan.ALL)
    return to_bf16(gate * sigmoid(gate) * up * factor).to(tl.float32)


@triton.jit
def write(
    codes, scale, line, size, folded, factor,
    FIRST: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Some groups to a row, or to panels of `size` places where PADDED is their width."""
    if PADDED:
        write_panels(codes, scale, line, size, folded, factor, PADDED, GROUPS, FIRST)
    else:
        column = (FIRST + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes + line * INNER + column, folded, mask=column < INNER)
        tl.store(scale + line, factor)


@triton.jit
def swiglu_kernel(
    both, share, of_pairs, codes, scale, limit, size,
    INNER: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, HAS_SHARE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """share * silu(gate) * up of one line, or of that at a pair's place, quantised: FIRST groups, and REST others."""
    begin()
    line = tl.program_id(0).to(tl.int64)
    factor = tl.load(share + line) if HAS_SHARE else 1.0
    if HAS_PLACES:
        line = tl.load(of_pairs + line).to(tl.int64)
    first, exponent = rounded_groups(activated(both, line, factor, limit, 0, FIRST, INNER, HAS_LIMIT))
    largest = tl.max(exponent, 0)
    if REST:
        rest, rest_exponent = rounded_groups(activated(both, line, factor, limit, FIRST, REST, INNER, HAS_LIMIT))
        largest = tl.maximum(largest, tl.max(rest_exponent, 0))
        folded = on_scale(rest, rest_exponent, largest)
        write(codes, scale, line, size, folded, power(largest), FIRST, REST, INNER, PADDED)
    folded = on_scale(first, exponent, largest)
    write(codes, scale, line, size, folded, power(largest), 0, FIRST, INNER, PADDED)


def swiglu(both: Tensor, share: Tensor | None, limit: float) -> Rows:
    """both [n, 2 * inner] bf16 (gate, up), share [n] float32 -> e4m3 rows [n, inner]."""
    inner = both.shape[1] // 2
    codes = torch.empty(len(both), inner, dtype=torch.uint8, device=both.device)
    scale = torch.empty(len(both), device=both.device)
    _launch(len(both), both, share, None, codes, scale, limit, 0, 0)
    return Rows(codes.view(E4M3), scale)


def swiglu_panels(
    both: Tensor, share: Tensor | None, limit: float, padded_width: int, places: Places | None = None
) -> Panels:
    """both [n, 2 * inner] bf16 -> e4m3 panels; with places both is at them, and share of pairs in their order."""
    panels = empty_panels(len(both), padded_width, places, both.device)
    of_pairs = places.of_pairs if places else None
    count = len(both) if of_pairs is None else len(of_pairs)
    _launch(count, both, share, of_pairs, panels.codes, panels.scale, limit, panels.size, padded_width)
    return panels


def _launch(
    count: int,
    both: Tensor,
    share: Tensor | None,
    of_pairs: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    limit: float,
    size: int,
    padded_width: int,
) -> None:
    inner = both.shape[1] // 2
    groups = two_powers_of_2(cdiv(padded_width or inner, 32))
    if count:
        swiglu_kernel[(count,)](
            both, both if share is None else share, both if of_pairs is None else of_pairs, codes, scale, limit, size,
            inner, padded_width, *groups, share is not None, limit > 0, of_pairs is not None,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
