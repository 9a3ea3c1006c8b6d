"""The products around attention: low-rank queries, window vectors, and the grouped output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.backends.cuda.hopper.attended import AttendedPanels
from deepinfer.backends.cuda.hopper.begin import begin
from deepinfer.backends.cuda.hopper.linear import grouped_linear, linear
from deepinfer.backends.cuda.hopper.matrices import Matrix, prepare_matrix
from deepinfer.backends.cuda.hopper.norm import Norm, prepare_norm, rms_norm
from deepinfer.backends.cuda.hopper.numbers import INVERSE_FP8_MAX, e4m3_bytes, exponent_above, power, to_bf16
from deepinfer.backends.cuda.hopper.panels import Panels, empty_panels, write_panels
from deepinfer.backends.cuda.hopper.products import Packed
from deepinfer.backends.cuda.hopper.quant import fold_groups
from deepinfer.backends.cuda.hopper.rope import rotate_heads, rotated_tail
from deepinfer.backends.cuda.hopper.sizes import next_power_of_2
from deepinfer.ops.reference.rope import rope_frequencies
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.values import Attended
from deepinfer.ops.weights import AttentionWeights


@dataclass(frozen=True)
class Attention:
    """Attention of one layer; wo_a [groups, out_rank, h * D / groups], sink [h] float32."""

    down: Matrix  # wq_a above wkv, [q_rank + D, H]
    q_norm: Norm
    wq_b: Matrix
    kv_norm: Norm
    sink: Tensor
    wo_a: Matrix
    wo_b: Matrix
    frequencies: Tensor
    num_heads: int
    num_groups: int
    window: int

    @property
    def dim(self) -> int:
        return len(self.kv_norm.weight)


def prepare_attention(attention: AttentionWeights) -> Attention:
    """Pack the weights; the two products on x become one."""
    return Attention(
        down=prepare_matrix(attention.wq_a, attention.wkv),
        q_norm=prepare_norm(attention.q_norm),
        wq_b=prepare_matrix(attention.wq_b),
        kv_norm=prepare_norm(attention.kv_norm),
        sink=attention.sink.value.float().contiguous(),
        wo_a=prepare_matrix(attention.wo_a, num_groups=attention.num_groups),
        wo_b=prepare_matrix(attention.wo_b),
        frequencies=rope_frequencies(attention.rope, attention.sink.value.device),
        num_heads=attention.num_heads,
        num_groups=attention.num_groups,
        window=attention.window,
    )


@triton.jit
def split_down_kernel(
    both, positions, q_norm, q_eps, kv_norm, kv_eps, frequencies, low_rank, window_rows, codes, scale, size,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, RANK_TILE: tl.constexpr, PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One token: both norms, the rotation of the window vector and its packed row.

    The low-rank query goes to panels of `size` places too where PADDED is their width.
    """
    begin()
    token = tl.program_id(0).to(tl.int64)
    both += token * (RANK + WIDTH)
    column = tl.arange(0, RANK_TILE)
    low = tl.load(both + column, mask=column < RANK, other=0.0).to(tl.float32)
    low = rms_norm(low, tl.load(q_norm + column, mask=column < RANK, other=0.0), RANK, q_eps)
    tl.store(low_rank + token * RANK + column, to_bf16(low), mask=column < RANK)
    if PADDED:
        folded, factor = fold_groups(tl.reshape(low, [RANK_TILE // 32, 32]))
        write_panels(codes, scale, token, size, folded, factor, PADDED, RANK_TILE // 32)

    column = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)[None, :]
    is_here = column < WIDTH
    kv = tl.load(both + RANK + column, mask=is_here, other=0.0).to(tl.float32)
    kv = rms_norm(kv, tl.load(kv_norm + column, mask=is_here, other=0.0), WIDTH, kv_eps)
    kv = rotated_tail(kv, tl.load(positions + token), frequencies, WIDTH, ROPE, PAIRS)
    groups = tl.reshape(kv, [PAIRS // 16, 32])
    exponent = exponent_above(tl.maximum(tl.max(tl.abs(groups), 1), 1e-4) * INVERSE_FP8_MAX)
    packed = e4m3_bytes(groups * power(254 - tl.minimum(exponent, 253))[:, None])
    window_rows += token * (WIDTH // 32 * 33)
    group = tl.arange(0, PAIRS // 16)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(window_rows + column, packed, mask=column < WIDTH)
    tl.store(window_rows + WIDTH + group, exponent.to(tl.uint8), mask=group < WIDTH // 32)


def attention_inputs(x: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank query [T, q_rank] bf16, rotated query [T, h, D] bf16, packed window rows [T, bytes] of x [T, H]."""
    low_rank, panels, window_rows = _split_down(x, positions, attention)
    q = linear(panels or low_rank, attention.wq_b).view(len(x), attention.num_heads, attention.dim)
    rotate_heads(q, positions, attention.frequencies)
    return low_rank, q, window_rows


def main_rows(x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Packed window rows [T, bytes] of x [T, H]."""
    return _split_down(x, positions, attention)[2]


def _split_down(x: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Panels | None, Tensor]:
    """The low-rank query, the same in panels where wq_b takes them, and window rows."""
    expect("x", x, (None, None), torch.bfloat16)
    num_tokens, rank, dim = len(x), len(attention.q_norm.weight), attention.dim
    expect("positions", positions, (num_tokens,), torch.int32)
    both = linear(x, attention.down)
    low_rank = torch.empty(num_tokens, rank, dtype=torch.bfloat16, device=x.device)
    window_rows = torch.empty(num_tokens, dim // 32 * 33, dtype=torch.uint8, device=x.device)
    padded = attention.wq_b.rows.padded_width if isinstance(attention.wq_b.rows, Packed) else 0
    panels = empty_panels(num_tokens, padded, None, x.device) if padded else None
    if num_tokens:
        codes, scale, size = (panels.codes, panels.scale, panels.size) if panels else (window_rows, low_rank, 0)
        split_down_kernel[(num_tokens,)](
            both, positions, attention.q_norm.weight, attention.q_norm.eps, attention.kv_norm.weight,
            attention.kv_norm.eps, attention.frequencies, low_rank, window_rows, codes, scale, size,
            rank, dim, 2 * len(attention.frequencies), next_power_of_2(max(rank, padded)), next_power_of_2(dim) // 2,
            padded, num_warps=4, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip
    return low_rank, panels, window_rows


def project_out(attended: Tensor | Attended, attention: Attention) -> Tensor:
    """wo_a per group of heads, then wo_b: [T, h, D] bf16, or in panels -> [T, H] bf16."""
    if isinstance(attended, Tensor):
        expect("attended", attended, (None, attention.num_heads, attention.dim), torch.bfloat16)
        attended = attended.unflatten(1, (attention.num_groups, -1)).flatten(2).contiguous()
    assert isinstance(attended, Tensor | AttendedPanels), "attended heads are of this backend"
    return linear(grouped_linear(attended, attention.wo_a), attention.wo_b)
