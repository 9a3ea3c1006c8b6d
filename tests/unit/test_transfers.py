"""What the device thread sends to a device while it serves goes through `ops/transfer.py`, which does not wait."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import deepinfer

SOURCE = Path(deepinfer.__file__).parent
FILES = [
    *sorted((SOURCE / "sampling").glob("*.py")), *sorted((SOURCE / "runner").glob("*.py")),
    SOURCE / "ops" / "reference" / "tokens.py", SOURCE / "ops" / "reference" / "sample.py",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_numbers_of_the_host_are_sent_by_to_device(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            assert name != "from_numpy", f"line {node.lineno}: memory that is not pinned makes its copy wait"
            assert name != "tensor" or not any(word.arg == "device" for word in node.keywords), f"line {node.lineno}"
