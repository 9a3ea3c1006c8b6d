"""What the CUDA sets of ops need to know about the device that they run on."""

from __future__ import annotations

import functools
import importlib.util

import torch

HOPPER = (9, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, (9, 0) on Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def runs_hopper_ops(device: torch.device) -> bool:
    """Whether the Triton kernels of `hopper/` can run there."""
    return device.type == "cuda" and capability(device) == HOPPER and importlib.util.find_spec("triton") is not None
