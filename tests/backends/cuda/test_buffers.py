"""No loop of a Triton kernel copies into a buffer that an unfinished product reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "ops" / "hopper_buffers.py"
WITH_PRODUCTS = {
    "mix_pieces_kernel", "matmul_kernel", "experts_kernel", "share_kernel", "value_kernel", "score_kernel",
    "candidate_kernel", "next_kernel", "next_peak_kernel", "large_kernel",
}  # fmt: skip


def report(*arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """Exit status, each kernel's lines and the last line; in a process whose kernels are compiled, not interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    _, *lines, last = done.stdout.splitlines()
    kernels: dict[str, list[str]] = {}
    for line in lines:
        name, rest = line.split(maxsplit=1)
        kernels.setdefault(name, []).append(rest)
    return done.returncode, kernels, last


def test_no_kernel_overwrites_a_tile_that_a_product_still_reads():
    status, kernels, last = report()
    assert status == 0 and last.endswith(" 0 writes into buffers in use"), kernels
    products = {name for name, lines in kernels.items() if any(not line.startswith("0 ") for line in lines)}
    assert products == WITH_PRODUCTS


def test_a_kernel_that_does_is_named():
    status, kernels, last = report(str(Path(__file__).with_name("overwritten.py")))
    assert status == 1 and not last.endswith(" 0 writes into buffers in use")
    [flawed], [sound] = kernels["flawed_kernel"], kernels["sound_kernel"]
    assert "is written by `ttg.async_copy_global_to_local` while a product reads it" in flawed
    assert sound.split() == ["1", "-"]
