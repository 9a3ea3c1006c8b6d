"""The pinned packages: exact, once each, within the ranges of pyproject.toml; those of the image are all it needs."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVED = ("serve", "structured", "trace")  # the extras in the image
ALONE = {"xgrammar"}  # installed without what it asks for


def pins(file):
    """Package -> its requirement, without those of included files."""
    lines = [line for line in (FOLDER / file).read_text().splitlines() if not line.startswith(("#", "-r "))]
    found = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(found) == len(lines), f"{file} names a package twice"
    return found


def all_pins():
    """Package -> its requirement over all files; no package is in two of them."""
    files = [pins(file.name) for file in FOLDER.glob("*.txt")]
    merged = {name: pin for found in files for name, pin in found.items()}
    assert len(merged) == sum(map(len, files))
    return merged


def asked_by(name):
    """What a package asks for on this machine; what a torch for a card brings along is not pinned."""
    for text in metadata.requires(name) or []:
        one = Requirement(text)
        is_of_build = name == "torch" and "platform" in str(one.marker)
        if not is_of_build and (one.marker is None or one.marker.evaluate({"extra": ""})):
            yield canonicalize_name(one.name)


def test_every_pin_is_one_exact_version():
    for name, pin in all_pins().items():
        operators = [(one.operator, "*" in one.version) for one in pin.specifier]
        assert operators == [("==", False)], f"{name} is {pin.specifier}"


def test_development_includes_the_server():
    included = [line for line in (FOLDER / "dev.txt").read_text().splitlines() if line.startswith("-r ")]
    assert included == ["-r serve.txt"]


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_pins_are_within_the_ranges_of_the_project(extra):
    wanted = map(Requirement, PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"])
    wrong = []
    for one in wanted:
        pin = all_pins().get(canonicalize_name(one.name))
        if pin is None or not all(one.specifier.contains(exact.version) for exact in pin.specifier):
            wrong.append((str(one), str(pin)))
    assert wrong == []


def test_the_servers_packages_are_those_it_needs_and_no_more():
    roots = [*PROJECT["dependencies"], *(text for extra in SERVED for text in PROJECT["optional-dependencies"][extra])]
    queue = [canonicalize_name(Requirement(text).name) for text in roots]
    needed = set()
    while queue:
        name = queue.pop()
        if name not in needed | ALONE:
            needed.add(name)
            queue += asked_by(name)
    assert set(pins("serve.txt")) == needed
    assert set(pins("no-deps.txt")) == ALONE
