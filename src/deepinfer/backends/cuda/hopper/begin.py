"""How a Triton kernel follows the one before it: it may start while that one ends, and waits itself.

CUDA calls it programmatic dependent launch. Kernels that are launched with `launch_pdl` begin with `begin`; others
start when all before them have ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.backends.cuda.hopper.numbers import INTERPRETED


@triton.jit
def begin():
    """Wait for the kernel before this one to end, then let the next one start; `begin` in native/hopper.cuh."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
