"""Who may import whom: the table in docs/design.md, section 3, is the rule that these tests hold."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "deepinfer"
EVERYBODY_MAY_IMPORT = ("errors", "log", "env")


@dataclass(frozen=True)
class Part:
    name: str
    allowed: tuple[str, ...]
    is_host: bool


NO_ROW = Part("a part without a row", (), False)


@cache
def parts():
    """The rows of the design table, by part name."""
    section = (ROOT / "docs" / "design.md").read_text().partition("## 3.")[2].partition("## 4.")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for names, allowed, host in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            found[name] = Part(name, tuple(re.findall(r"`([\w.]+)`", allowed)), host.strip() == "yes")
    return found


@cache
def modules():
    """Every module below the package, as dotted names without `deepinfer.`; empty __init__ files are left out."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("")
        if path.name == "__init__.py" and path.parent != PACKAGE:
            continue
        names[".".join(relative.parts)] = path
    return names


def part_of(module):
    """The row with the longest name that is the module or one of its parents; NO_ROW when none covers it."""
    pieces = module.split(".")
    candidates = [".".join(pieces[:n]) for n in range(len(pieces), 0, -1)]
    return next((parts()[name] for name in candidates if name in parts()), NO_ROW)


def imported(path):
    """Every module that the file imports, at any depth: (dotted name, line)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the layer; write the whole name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def own_module(name):
    """The package module behind an imported name, which may be a module or a name inside one."""
    if name != "deepinfer" and not name.startswith("deepinfer."):
        return None
    inner = name.removeprefix("deepinfer").lstrip(".")
    while inner and inner not in modules():
        inner = inner.rpartition(".")[0]
    return inner or "__init__"


def test_own_module_resolves_names_inside_modules():
    assert own_module("deepinfer.config.engine.EngineConfig") == "config.engine"
    assert own_module("deepinfer.log") == "log"
    assert own_module("deepinfer.LLM") == "__init__"
    assert own_module("torch.nn") is None


def test_imported_sees_deferred_imports(tmp_path):
    (tmp_path / "late.py").write_text("def f():\n    from deepinfer.config import engine\n    import torch\n")
    assert list(imported(tmp_path / "late.py")) == [("deepinfer.config.engine", 2), ("torch", 3)]


def test_table_is_read_whole():
    assert parts()["config"] == Part("config", (), True)
    assert parts()["messages"].allowed == ("images.messages", "sampling.params", "structured.grammar")
    assert not parts()["ops"].is_host
    assert {name for part in parts().values() for name in part.allowed} <= set(parts())


def test_table_has_no_cycle():
    order = list(TopologicalSorter({part.name: part.allowed for part in parts().values()}).static_order())
    assert order.index("config") < order.index("runner") < order.index("engine") < order.index("cli")


def test_host_parts_only_name_host_parts():
    wrong = [
        (part.name, name)
        for part in parts().values()
        if part.is_host
        for name in part.allowed
        if not parts()[name].is_host
    ]
    assert wrong == []


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_what_its_row_allows(module):
    part = part_of(module)
    assert part is not NO_ROW, f"{module} belongs to no row of the table in docs/design.md, section 3"
    allowed = {part.name, *part.allowed, *EVERYBODY_MAY_IMPORT}
    wrong = []
    for name, line in imported(modules()[module]):
        target = own_module(name)
        if target is not None and part_of(target).name not in allowed:
            wrong.append(f"{module}:{line} imports {name}, but {part.name} may not import {part_of(target).name}")
        if part.is_host and name.partition(".")[0] == "torch":
            wrong.append(f"{module}:{line} imports torch, but {part.name} is a host part")
    assert wrong == []


@pytest.mark.parametrize("module", ["deepinfer", *(name for name in modules() if part_of(name).is_host)])
def test_host_module_does_not_load_torch(module):
    name = module if module == "deepinfer" else f"deepinfer.{module}"
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr or f"{name} loads torch"
