"""The library for other processors gives the same results, as far as this machine can run it."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from backends.cpu.test_matrix import FORMATS, LIMIT, error, matrix, vectors
from deepinfer.backends.cpu import build
from deepinfer.backends.cpu.library import SIGNATURES
from deepinfer.backends.cpu.matrix import prepare_matrix
from deepinfer.ops.reference import quant

VARIANTS = {"portable": (), "avx2": build.AVX2, "avx512": build.AVX512}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """The products alone, compiled for one set of instructions."""
    folder = tmp_path_factory.mktemp("variants")

    def make(name: str) -> Path:
        file = folder / f"{name}.so"
        flags = (*build.FLAGS, *(f"-m{feature}" for feature in VARIANTS[name]))
        sources = [build.SOURCES / f"{part}.cpp" for part in ("gemm", "cache_formats", "threads")]
        build._compile([build.find_compiler(), *flags, f"-I{build.SOURCES}"], sources, file)
        return file

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_products_are_right_and_rows_independent(compiled, name):
    file = compiled(name)
    if not set(VARIANTS[name]) <= set(build.cpu_features()):
        pytest.skip(f"this processor does not run {name}")
    library = ctypes.CDLL(str(file))
    library.multiply.restype, *library.multiply.argtypes = SIGNATURES["multiply"]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), packed.rows)
        library.multiply(x.data_ptr(), len(x), x.stride(0), packed.address, out.data_ptr())
        return out

    for number_format, columns in itertools.product(FORMATS, (34, 98, 160)):  # 2, 4 and 5 blocks of 32
        weight = matrix(number_format, 100, columns)
        packed, x = prepare_matrix(weight), vectors(37, columns)
        assert error(x, quant.dequantise(weight, torch.float64), multiply(x)) < LIMIT
        assert torch.equal(multiply(x), torch.cat([multiply(row.unsqueeze(0)) for row in x]))
