"""Hyper-connections: m residual streams, collapsed before and spread after each half layer.

Source: architecture page, hyper-connections (mHC, single pass).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.ops.reference import quant
from deepinfer.ops.reference.norm import Norm, prepare_norm, rms_norm, rms_scale
from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HyperWeights, NormWeights

TILE_BYTES = 64 << 20  # products of all pairs of streams that are held at a time


@dataclass(frozen=True)
class Hyper:
    """Mix weights of a half layer: fn [(2 + m) * m, m * H] in the accumulation dtype, gain, base [(2 + m) * m]."""

    fn: Tensor
    gain: Tensor
    base: Tensor
    num_streams: int
    num_iterations: int
    eps: float
    norm_eps: float
    norm: Norm


def prepare_hyper(numerics: Numerics, hyper: HyperWeights, norm: NormWeights) -> Hyper:
    """Widen the weights."""
    fn = quant.dequantise(hyper.fn, numerics.accumulate)
    streams = next((m for m in range(1, fn.shape[0]) if (2 + m) * m == fn.shape[0]), 0)
    expect("hyper fn", fn, ((2 + streams) * streams, None))
    expect("hyper base", hyper.base.value, (fn.shape[0],))
    expect("hyper scale", hyper.scale.value, (3,))
    sizes = torch.tensor([streams, streams, streams * streams], device=fn.device)
    gain = hyper.scale.value.float().repeat_interleave(sizes)
    return Hyper(
        fn=fn,
        gain=gain,
        base=hyper.base.value.float(),
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
    if numerics.fuses:
        mix = F.linear(F.rms_norm(flat, flat.shape[1:], None, hyper.norm_eps), hyper.fn)
        mix = torch.addcmul(hyper.base, mix, hyper.gain)
    else:
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
    step = max(1, TILE_BYTES // (4 * streams.shape[1] * max(1, streams[0:1].numel())))
    parts = zip(mix.comb.split(step), streams.split(step), strict=True)
    mixed = [(comb.unsqueeze(-1) * part.unsqueeze(2)).sum(1) for comb, part in parts]
    return numerics.act(spread + torch.cat(mixed))


def hyper_next(
    numerics: Numerics, streams: Tensor, output: Tensor, mix: Mix, hyper: Hyper
) -> tuple[Tensor, Tensor, Mix]:
    """`hyper_leave`, then `hyper_enter` of the next half: streams [T, m, H] float32, its input [T, H] and its mix."""
    streams = hyper_leave(numerics, streams, output, mix)
    return streams, *hyper_enter(numerics, streams, mix.pre, hyper)


def collapse(numerics: Numerics, streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre[i] * streams[i]: [T, H] float32."""
    return numerics.act((pre.unsqueeze(-1) * streams).sum(1))


def _sinkhorn(numerics: Numerics, logits: Tensor, hyper: Hyper) -> Tensor:
    """Softmax over rows, then columns and rows brought to sum 1 in turns, columns last: [T, m, m]."""
    m, eps = hyper.num_streams, hyper.eps
    if numerics.fuses:
        return _sinkhorn_logs(logits.reshape(-1, m, m), hyper)
    comb = logits.reshape(-1, m, m).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(hyper.num_iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _sinkhorn_logs(logits: Tensor, hyper: Hyper) -> Tensor:
    """The same on logarithms, one call a normalisation, with the tokens innermost.

    The eps of a divisor scales whole rows or columns, which the next normalisation undoes; so only
    the last one is applied.
    """
    logs = logits.permute(1, 2, 0).softmax(1).add_(hyper.eps).log_().log_softmax(0)
    for _ in range(hyper.num_iterations - 1):
        logs = logs.log_softmax(1).log_softmax(0)
    return logs.sub_(hyper.eps).exp_().permute(2, 0, 1)
