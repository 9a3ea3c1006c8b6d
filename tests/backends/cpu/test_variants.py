"""The library for other processors gives the same results, as far as this machine can run it."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from backends.cpu.test_matrix import FORMATS, LIMIT, error, matrix, vectors
from deepinfer.backends.cpu import build
from deepinfer.backends.cpu import matrix as products
from deepinfer.backends.cpu.library import SIGNATURES
from deepinfer.ops.reference import quant

SOURCES = ("gemm", "tile_products", "tiles", "pack", "cache_formats", "threads")
FUNCTIONS = ("multiply", "pack", "stays_packed", "tile_parts", "set_tile_parts")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """The products alone, compiled for one set of instructions."""
    folder = tmp_path_factory.mktemp("variants")

    def make(name: str) -> Path:
        file = folder / f"{name}.so"
        flags = (*build.FLAGS, *build.feature_flags(build.INSTRUCTIONS[name]), f"-I{build.SOURCES}")
        build._compile([build.find_compiler(), *flags], [build.SOURCES / f"{part}.cpp" for part in SOURCES], file)
        return file

    return make


@pytest.mark.parametrize("name", build.INSTRUCTIONS)
def test_products_are_right_and_rows_independent(compiled, name, monkeypatch):
    file = compiled(name)
    if not set(build.INSTRUCTIONS[name]) <= build._known_features():
        pytest.skip(f"this processor does not run {name}")
    library = ctypes.CDLL(str(file))
    for function in FUNCTIONS:
        getattr(library, function).restype, *getattr(library, function).argtypes = SIGNATURES[function]
    monkeypatch.setattr(products, "native", lambda: library)
    assert library.tile_parts() == {"amx": 3, "avx512bf16": 1}.get(name, 0)
    for number_format, columns in itertools.product(FORMATS, (34, 98, 160)):  # 2, 4 and 5 blocks of 32
        weight = matrix(number_format, 100, columns)
        packed, x = products.prepare_matrix(weight), vectors(37, columns)
        found = products.multiply(x, packed)
        assert error(x, quant.dequantise(weight, torch.float64), found) < LIMIT
        alone = [products.multiply(row.unsqueeze(0), packed) for row in x]
        assert torch.equal(found, torch.cat(alone))
