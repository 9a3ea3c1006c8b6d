"""Hyper-connections: m residual streams, collapsed before and spread after each half layer.

Source: architecture page, hyper-connections (mHC, single pass).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm, rms_scale
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HyperWeights, NormWeights


@dataclass(frozen=True)
class Hyper:
    """Mix weights of a half layer.

    fn [(2 + m) * m, m * H] in the accumulation dtype; gain, base [(2 + m) * m] float32.
    row_sums, column_sums [m * m + 1, m * m]: a flattened matrix with eps behind it, times these,
    gives for each element the sum over its row or column, plus eps.
    """

    fn: Tensor
    gain: Tensor
    base: Tensor
    row_sums: Tensor
    column_sums: Tensor
    num_streams: int
    num_iterations: int
    eps: float
    norm_eps: float
    norm: Norm


def prepare_hyper(numerics: Numerics, hyper: HyperWeights, norm: NormWeights) -> Hyper:
    """Widen the weights and lay out the constants of the Sinkhorn rounds."""
    fn = quant.dequantise(hyper.fn, numerics.accumulate)
    streams = next((m for m in range(1, fn.shape[0]) if (2 + m) * m == fn.shape[0]), 0)
    expect("hyper fn", fn, ((2 + streams) * streams, None))
    expect("hyper base", hyper.base.value, (fn.shape[0],))
    expect("hyper scale", hyper.scale.value, (3,))
    sizes = torch.tensor([streams, streams, streams * streams], device=fn.device)
    gain = hyper.scale.value.float().repeat_interleave(sizes)
    eye = torch.eye(streams, device=fn.device)
    ones = torch.ones_like(eye)
    last = torch.ones(1, streams * streams, device=fn.device)
    return Hyper(
        fn=fn,
        gain=gain,
        base=hyper.base.value.float(),
        row_sums=torch.cat([torch.kron(eye, ones), last]),
        column_sums=torch.cat([torch.kron(ones, eye), last]),
        num_streams=streams,
        num_iterations=hyper.num_iterations,
        eps=hyper.eps,
        norm_eps=hyper.norm_eps,
        norm=prepare_norm(norm),
    )


def hyper_enter(numerics: Numerics, streams: Tensor, pre: Tensor, hyper: Hyper) -> tuple[Tensor, Mix]:
    """Input of a half layer [T, H], and the mix of this half from streams [T, m, H] float32."""
    m = hyper.num_streams
    expect("streams", streams, (None, m, hyper.norm.weight.shape[0]), torch.float32)
    expect("pre", pre, (streams.shape[0], m), torch.float32)
    x = rms_norm(numerics, collapse(numerics, streams, pre), hyper.norm)
    flat = streams.flatten(1)
    mix = numerics.matmul(flat, hyper.fn) * rms_scale(flat, hyper.norm_eps)
    mix = mix * hyper.gain + hyper.base
    gates = torch.sigmoid(mix[:, : 2 * m])
    return x, Mix(gates[:, :m] + hyper.eps, gates[:, m:] * 2, _sinkhorn(numerics, mix[:, 2 * m :], hyper))


def hyper_leave(numerics: Numerics, streams: Tensor, output: Tensor, mix: Mix) -> Tensor:
    """new[j] = post[j] * output + sum_i comb[i, j] * streams[i]: [T, m, H] float32."""
    expect("streams", streams, (None, None, None), torch.float32)
    expect("output", output, (streams.shape[0], streams.shape[2]), torch.float32)
    spread = mix.post.unsqueeze(2) * output.unsqueeze(1)
    if numerics.fuses:
        return torch.baddbmm(spread, mix.comb.mT, streams)
    return numerics.act(spread + (mix.comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1))


def collapse(numerics: Numerics, streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre[i] * streams[i]: [T, H] float32."""
    return numerics.act((pre.unsqueeze(-1) * streams).sum(1))


def _sinkhorn(numerics: Numerics, logits: Tensor, hyper: Hyper) -> Tensor:
    """Softmax over rows, then columns and rows brought to sum 1 in turns, columns last: [T, m, m]."""
    m = hyper.num_streams
    comb = logits.reshape(-1, m, m).softmax(-1) + hyper.eps
    if numerics.fuses:
        return _sinkhorn_products(comb, hyper)
    comb = comb / (comb.sum(-2, keepdim=True) + hyper.eps)
    for _ in range(hyper.num_iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hyper.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hyper.eps)
    return comb


def _sinkhorn_products(comb: Tensor, hyper: Hyper) -> Tensor:
    """The rounds as one small product (the sums, eps included) and one division in place each."""
    m = hyper.num_streams
    padded = torch.full((len(comb), m * m + 1), hyper.eps, device=comb.device)
    flat = padded[:, :-1]
    flat.copy_(comb.flatten(1))
    sums = torch.empty(len(comb), m * m, device=comb.device)
    flat.div_(torch.mm(padded, hyper.column_sums, out=sums))
    for _ in range(hyper.num_iterations - 1):
        flat.div_(torch.mm(padded, hyper.row_sums, out=sums))
        flat.div_(torch.mm(padded, hyper.column_sums, out=sums))
    return flat.reshape(-1, m, m)
