"""Which device an engine runs on, and which implementation each op has there."""

from __future__ import annotations

import os

import torch

from deepinfer import env, log
from deepinfer.backends.cpu.library import is_available, native
from deepinfer.backends.cpu.ops import cpu_ops
from deepinfer.backends.cuda.device import runs_hopper_ops
from deepinfer.config.engine import MAX_THREADS, ModelOptions
from deepinfer.errors import ConfigError
from deepinfer.ops import table
from deepinfer.ops.check import OpChecker
from deepinfer.ops.clock import OpClock
from deepinfer.ops.reference.build import reference_ops

logger = log.get(__name__)
MOST_THREADS = 4  # unless more are asked for
# Prompt tokens of a step on a CPU: more are not faster there, or not much, and what runs beside prompts waits less.
VECTOR_PREFILL_TOKENS, TILE_PREFILL_TOKENS = 128, 256


def choose_device(options: ModelOptions) -> torch.device:
    """The torch device that `options.device` names; auto = the accelerator when there is one.

    Raises ConfigError when it is not there.
    """
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; use device='cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and options.device in ("cuda", "auto") else "cpu")


def default_threads() -> int:
    """What OMP_NUM_THREADS says, else the cores that this process may use, at most `MOST_THREADS`.

    Planning and answers need some time as well, and a decode step gains little from more.
    """
    wanted = env.get("OMP_NUM_THREADS") or ""
    if wanted.isdecimal() and len(wanted) < 20 and int(wanted) > 0:
        return min(int(wanted), MAX_THREADS)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_THREADS)


def load_ops(options: ModelOptions) -> table.Ops:
    """The op table of this configuration.

    Where the precision lets the backend choose, a CPU's native ops stand in for the reference's, and on a
    Hopper card the Triton ones.
    Raises ConfigError when batch invariance is asked for and these ops do not promise it.
    """
    sets, device = {"reference": reference_ops(options.precision)}, choose_device(options)
    if options.precision == "fast" and device.type == "cpu" and is_available():
        native().set_num_threads(options.num_threads or default_threads())
        sets["cpu"] = cpu_ops()
    if options.precision == "fast" and runs_hopper_ops(device):
        from deepinfer.backends.cuda.hopper.ops import hopper_ops  # needs triton, which a CPU does without

        sets["hopper"] = hopper_ops()
    if options.batch_invariant and len(sets) == 1:
        raise ConfigError(
            "batch_invariant is true, but torch's ops do not promise it; use precision='fast' on a CPU with a C++ "
            "compiler or on a Hopper card, or leave it false"
        )
    ops = table.build(sets)
    logger.info("ops: %s (precision %s)", ", ".join(sorted(set(ops.origin.values()))), options.precision)
    if options.time_ops:
        return OpClock(device).around(ops)
    return OpChecker(device).around(ops) if options.check_ops else ops


def short_prefill(device: torch.device, ops: table.Ops) -> int | None:
    """Prompt tokens that a step on a CPU takes unless more are asked for; None elsewhere."""
    if device.type != "cpu":
        return None
    has_tiles = "cpu" in ops.origin.values() and bool(native().tile_parts())
    return TILE_PREFILL_TOKENS if has_tiles else VECTOR_PREFILL_TOKENS


def captures_steps(options: ModelOptions, ops: table.Ops) -> bool:
    """Whether decode steps may become CUDA graphs: no Hopper op waits for the device, but clocks and checks do."""
    return "hopper" in ops.origin.values() and not (options.enforce_eager or options.time_ops or options.check_ops)
