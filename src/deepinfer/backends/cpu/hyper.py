"""Hyper-connections; see ops/reference/hyper.py for the maths."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_BF16, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, LONG, POINTER, dense, numbers
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.values import Mix
from deepinfer.ops.weights import HyperWeights, NormWeights

MAX_STREAMS = 16


class HyperStruct(ctypes.Structure):
    """`struct Hyper` of native/hyper.cpp."""

    _fields_ = (
        ("fn", MatrixStruct),
        ("gain", POINTER),
        ("base", POINTER),
        ("norm", POINTER),
        ("num_streams", LONG),
        ("hidden", LONG),
        ("num_iterations", LONG),
        ("eps", FLOAT),
        ("mix_eps", FLOAT),
        ("norm_eps", FLOAT),
    )


@dataclass(frozen=True)
class CpuHyper:
    """Mix weights of a half layer and the norm of its input."""

    fn: Matrix
    parts: tuple[Tensor, ...]
    struct: HyperStruct
    address: int
    num_streams: int
    hidden: int


def prepare_hyper(hyper: HyperWeights, norm: NormWeights) -> CpuHyper:
    """Pack the mix weights; the scale of each share becomes a gain per column."""
    fn = prepare_matrix(hyper.fn, rounding=TO_BF16)
    streams = next((m for m in range(1, MAX_STREAMS + 1) if (2 + m) * m == fn.rows), 0)
    require(streams > 0, f"hyper fn has {fn.rows} rows; it must have (2 + m) * m for m <= {MAX_STREAMS} streams")
    hidden = norm.weight.value.shape[0]
    expect("hyper fn", hyper.fn.value, (fn.rows, streams * hidden))
    expect("hyper base", hyper.base.value, (fn.rows,))
    expect("hyper scale", hyper.scale.value, (3,))
    sizes = torch.tensor([streams, streams, streams * streams])
    parts = (
        numbers(hyper.scale.value.float().repeat_interleave(sizes)),
        numbers(hyper.base.value),
        numbers(norm.weight.value),
    )
    struct = HyperStruct(
        fn.structs[0], *(part.data_ptr() for part in parts), streams, hidden, hyper.num_iterations,
        hyper.eps, hyper.norm_eps, norm.eps,
    )  # fmt: skip
    return CpuHyper(fn, parts, struct, ctypes.addressof(struct), streams, hidden)


def hyper_enter(streams: Tensor, pre: Tensor, hyper: CpuHyper) -> tuple[Tensor, Mix]:
    """Input of a half layer [T, H], and the mix of this half from streams [T, m, H] float32."""
    num_tokens, m, hidden = len(streams), hyper.num_streams, hyper.hidden
    streams = dense("streams", streams, (num_tokens, m, hidden))
    pre = dense("pre", pre, (num_tokens, m))
    x = torch.empty(num_tokens, hidden)
    mix = Mix(torch.empty(num_tokens, m), torch.empty(num_tokens, m), torch.empty(num_tokens, m, m))
    native().hyper_enter(
        hyper.address, streams.data_ptr(), pre.data_ptr(), num_tokens,
        x.data_ptr(), mix.pre.data_ptr(), mix.post.data_ptr(), mix.comb.data_ptr(),
    )  # fmt: skip
    return x, mix


def hyper_leave(streams: Tensor, output: Tensor, mix: Mix) -> Tensor:
    """new[j] = post[j] * output + sum_i comb[i, j] * streams[i]: [T, m, H] float32."""
    num_tokens, m, hidden = streams.shape
    streams = dense("streams", streams, (num_tokens, m, hidden))
    output = dense("output", output, (num_tokens, hidden))
    post, comb = dense("post", mix.post, (num_tokens, m)), dense("comb", mix.comb, (num_tokens, m, m))
    require(m <= MAX_STREAMS, f"there are {m} streams; there must be at most {MAX_STREAMS}")
    result = torch.empty_like(streams)
    native().hyper_leave(
        streams.data_ptr(), output.data_ptr(), post.data_ptr(), comb.data_ptr(),
        num_tokens, m, hidden, result.data_ptr(),
    )  # fmt: skip
    return result


def hyper_next(streams: Tensor, output: Tensor, mix: Mix, hyper: CpuHyper) -> tuple[Tensor, Tensor, Mix]:
    """`hyper_leave`, then `hyper_enter` of the next half: streams [T, m, H] float32, its input [T, H] and its mix."""
    streams = hyper_leave(streams, output, mix)
    return streams, *hyper_enter(streams, mix.pre, hyper)
