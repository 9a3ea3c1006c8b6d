"""Rules that every file of the project keeps."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "deepinfer"
TEXT = {".py", ".md", ".toml", ".txt", ".json", ""}
BINARY_FREE = [PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "scripts", ROOT / "benchmarks"]


def text_files():
    """Hand-written files: code, scripts and pages; not the model, recordings or what tools left behind."""
    for folder in BINARY_FREE:
        for path in folder.rglob("*"):
            is_data = {"data", "golden", "__pycache__"} & set(path.relative_to(ROOT).parts)
            if path.is_file() and path.suffix in TEXT and not is_data:
                yield path
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml"))


def test_init_files_below_the_root_are_empty():
    full = [str(path) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE and path.read_text().strip()]
    assert full == []


def test_every_package_folder_has_an_init_file():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_files_do_not_refer_to_places_outside_the_project():
    outside = re.compile(r"\.\./" + r"shared\b|(?<![\w.])/" + r"work/")
    found = [
        f"{path}:{n}"
        for path in text_files()
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if outside.search(line)
    ]
    assert found == []


def test_python_files_are_in_english_letters():
    # Latin letters, signs and the token spellings of the model; no letters of other scripts.
    other = re.compile(r"[\u0370-\u1fff\u2c00-\ud7ff\uf900-\ufdff]")
    allowed = re.compile(r"[\u2581\uff5c]")
    found = []
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "tests" / "unit").rglob("*.py")):
        if other.search(allowed.sub("", path.read_text())):
            found.append(str(path))
    assert found == []


def test_scripts_are_executable_and_valid_bash():
    for name in ("scripts/demo", "scripts/test", "scripts/lint", ".ci/run"):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, f"{name} is not executable"
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0, (
            f"{name} is not valid bash"
        )
