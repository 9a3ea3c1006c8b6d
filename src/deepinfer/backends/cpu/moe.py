"""Router, routed experts and the shared expert. Expert weights stay packed, the expert first."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.matrix import TO_FP8, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, LONG, POINTER, dense, numbers, rows_of
from deepinfer.errors import ShapeError
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import ExpertWeights, RouterWeights

SCORINGS = ("sqrtsoftplus", "softmax", "sigmoid")  # in the order of `enum Scoring`


class RouterStruct(ctypes.Structure):
    """`struct Router` of native/moe.cpp."""

    _fields_ = (
        ("matrix", MatrixStruct),
        ("bias", POINTER),
        ("bias_image", POINTER),
        ("num_active", LONG),
        ("scoring", LONG),
        ("normalize", LONG),
        ("scaling", FLOAT),
        ("temperature", FLOAT),
    )


class ExpertsStruct(ctypes.Structure):
    """`struct Experts` of native/moe.cpp."""

    _fields_ = (("gate_up", POINTER), ("down", POINTER), ("num_experts", LONG), ("limit", FLOAT))


@dataclass(frozen=True)
class CpuRouter:
    """A router; bias for text and image tokens [E] float32."""

    matrix: Matrix
    biases: tuple[Tensor, Tensor]
    struct: RouterStruct
    address: int
    num_active: int


@dataclass(frozen=True)
class CpuExperts:
    """Routed experts, or a shared one: w1 above w3, and w2."""

    gate_up: Matrix
    down: Matrix
    struct: ExpertsStruct
    address: int


def prepare_router(router: RouterWeights) -> CpuRouter:
    """Pack the weights. Raises ShapeError for a scoring that does not exist."""
    require(
        router.scoring in SCORINGS, f"router scoring is {router.scoring!r}; it must be one of {', '.join(SCORINGS)}"
    )
    matrix, biases = prepare_matrix(router.weight), (numbers(router.bias.value), numbers(router.bias_vl.value))
    for bias in biases:
        expect("router bias", bias, (matrix.rows,))
    require(0 < router.num_active <= matrix.rows, f"num_active is {router.num_active}; there are {matrix.rows} experts")
    struct = RouterStruct(
        matrix.structs[0], *(bias.data_ptr() for bias in biases), router.num_active, SCORINGS.index(router.scoring),
        router.normalize, router.scaling, router.temperature,
    )  # fmt: skip
    return CpuRouter(matrix, biases, struct, ctypes.addressof(struct), router.num_active)


def route(x: Tensor, is_image: Tensor | None, router: CpuRouter) -> tuple[Tensor, Tensor]:
    """Choose experts for x [T, H]: (chosen [T, k] int32 best first, share [T, k] float32)."""
    x = rows_of("x", x, router.matrix.columns)
    num_tokens, image = len(x), None
    if is_image is not None:
        is_image = dense("is_image", is_image, (num_tokens,), torch.bool)
        image = is_image.data_ptr()
    chosen = torch.empty(num_tokens, router.num_active, dtype=torch.int32)
    share = torch.empty(num_tokens, router.num_active)
    native().route(router.address, x.data_ptr(), x.stride(0), image, num_tokens, chosen.data_ptr(), share.data_ptr())
    return chosen, share


def prepare_experts(experts: ExpertWeights) -> CpuExperts:
    """Pack the experts, or one shared expert."""
    gate_up, down = prepare_matrix(experts.w1, experts.w3, rounding=TO_FP8), prepare_matrix(experts.w2, rounding=TO_FP8)
    require(
        gate_up.rows == 2 * down.columns and len(gate_up.structs) == len(down.structs),
        f"w1 and w3 have {gate_up.rows} rows together; they must have twice the {down.columns} columns of w2",
    )
    struct = ExpertsStruct(gate_up.address, down.address, len(down.structs), experts.limit)
    return CpuExperts(gate_up, down, struct, ctypes.addressof(struct))


def experts(x: Tensor, chosen: Tensor, share: Tensor, experts: CpuExperts) -> Tensor:
    """Sum over the chosen experts in ascending order: x [T, H], chosen and share [T, k] -> [T, H] float32."""
    x = rows_of("x", x, experts.gate_up.columns)
    num_tokens, k = chosen.shape
    require(num_tokens == len(x), f"chosen has {num_tokens} rows; x has {len(x)}")
    chosen = dense("chosen", chosen, (num_tokens, k), torch.int32)
    share = dense("share", share, (num_tokens, k))
    out = torch.empty(num_tokens, experts.down.rows)
    if native().experts(
        experts.address, x.data_ptr(), x.stride(0), chosen.data_ptr(), share.data_ptr(), num_tokens, k, out.data_ptr()
    ):
        raise ShapeError(
            f"chosen reaches from {chosen.min()} to {chosen.max()}; there are {len(experts.down.structs)} experts"
        )
    return out


def prepare_shared_expert(expert: ExpertWeights) -> CpuExperts:
    """Pack the shared expert."""
    return prepare_experts(expert)


def shared_expert(x: Tensor, routed: Tensor, expert: CpuExperts) -> Tensor:
    """routed + w2(swiglu(w1 x, w3 x)): [T, H] float32."""
    x = rows_of("x", x, expert.gate_up.columns)
    num_tokens = len(x)
    routed = dense("routed", routed, (num_tokens, expert.down.rows))
    out = torch.empty(num_tokens, expert.down.rows)
    native().shared_expert(expert.address, x.data_ptr(), x.stride(0), routed.data_ptr(), num_tokens, out.data_ptr())
    return out
