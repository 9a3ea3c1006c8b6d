"""Kernels that may start early wait for the kernel before them, first of all."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import deepinfer

HOPPER = Path(deepinfer.__file__).parent / "backends" / "cuda" / "hopper"
TREES = [ast.parse(file.read_text()) for file in sorted(HOPPER.glob("*.py"))]


def launches() -> list[tuple[str, bool]]:
    """Each launch of a Triton kernel, `kernel[grid](...)`, and whether it may start early."""
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        (call.func.value.id, any(keyword.arg == "launch_pdl" for keyword in call.keywords))
        for call in calls
        if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)
    ]


def waits(kernel: ast.FunctionDef) -> bool:
    first = kernel.body[1 if ast.get_docstring(kernel) else 0]
    return ast.unparse(first) == "begin()"


def test_triton_kernels_that_start_early_are_those_that_begin():
    functions = {node.name: node for tree in TREES for node in tree.body if isinstance(node, ast.FunctionDef)}
    early = {name for name, is_early in launches() if is_early}
    assert early == {name for name, function in functions.items() if waits(function)} and "matmul_kernel" in early
    assert not early & {name for name, is_early in launches() if not is_early}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("file", sorted((HOPPER / "native").glob("*.cu")), ids=lambda file: file.stem)
def test_every_kernel_in_cuda_waits_before_it_writes(file, tmp_path):
    made = tmp_path / "made.ptx"
    command = ["nvcc", "-std=c++17", "-ptx", "-gencode=arch=compute_90a,code=compute_90a", "-o", str(made), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    kernels = re.split(r"\.visible \.entry ", made.read_text())[1:]
    assert kernels
    for text in kernels:
        before = text[: text.index("griddepcontrol.wait")]
        assert not re.search(r"\b(st|red|atom)\.global|cp\.async\.bulk\.global", before), text[:40]
