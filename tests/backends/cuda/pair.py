"""The reference with the released roundings and the Hopper ops, on whatever device there is."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.table import Ops, build

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter multiplies tiles with numpy, whose sums may depend on where a row lies in its tile.
on_device = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="no CUDA device; the interpreter's products promise no bits"
)


@functools.cache
def reference() -> Ops:
    """On the CPU, with every rounding of the released model and sums in float64."""
    return build({"reference": reference_ops("exact")})


@functools.cache
def hopper() -> Ops:
    from deepinfer.backends.cuda.hopper.ops import hopper_ops

    return build({"reference": reference_ops("fast"), "hopper": hopper_ops()})


def placed(value: Any) -> Any:
    """Tensors of a weights dataclass, a batch or a list, on the device of the kernels."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(placed(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: placed(getattr(value, name)) for name in names})
    return value


def narrow(x: Tensor) -> Tensor:
    """An activation as the kernels take it: bf16, on their device."""
    return x.to(torch.bfloat16).to(DEVICE)


def wide(x: Tensor) -> Tensor:
    """A kernel's result as float32 on the CPU."""
    return x.float().cpu()
