"""CUDA C++ kernels: what NVRTC and the driver are asked for, and what becomes of their refusals."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from deepinfer.backends.cuda import native

pytest.importorskip("triton", reason="triton is not installed")
from deepinfer.backends.cuda.hopper import attention  # noqa: E402

CUBIN = b"\x7fELF made"


class FakeCompiler:
    """NVRTC's functions as `native` calls them; a source that says `error` does not compile."""

    def __init__(self) -> None:
        self.flags: list[bytes] = []
        self.source = self.destroyed = None

    def nvrtcCreateProgram(self, program, source, name, *headers):
        self.source = source
        return 0

    def nvrtcCompileProgram(self, program, count, flags):
        self.flags = flags[:count]
        return 6 if b"error" in self.source else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = 10

    def nvrtcGetProgramLog(self, program, text):
        text.raw = b"line 1: x\0"

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(CUBIN)

    def nvrtcGetCUBIN(self, program, text):
        text.raw = CUBIN

    def nvrtcDestroyProgram(self, program):
        self.destroyed = True


class FakeDriver:
    """The driver's functions; `refuses` names one that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.calls = refuses, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuLaunchKernelEx":
                self.config = ctypes.string_at(arguments[0].value, native.CONFIG.size)
                self.packed = ctypes.string_at(ctypes.c_void_p.from_address(arguments[2].value).value, 40)
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of resources"
            return 1 if name == self.refuses else 0

        return call


@pytest.fixture
def compiler(monkeypatch):
    fake = FakeCompiler()
    monkeypatch.setattr(native, "_nvrtc", lambda: fake)
    native.compile_source.cache_clear()
    yield fake
    native.compile_source.cache_clear()


def source_of(folder: Path, text: bytes) -> Path:
    file = folder / "some.cu"
    file.write_bytes(text)
    return file


def test_a_source_is_compiled_once_for_its_architecture_with_its_folder_to_include_from(compiler, tmp_path):
    file = source_of(tmp_path, b"fine")
    assert native.compile_source(file, "sm_90a") == CUBIN
    assert compiler.flags == [b"--std=c++17", b"--gpu-architecture=sm_90a", f"--include-path={tmp_path}".encode()]
    assert compiler.source == b"fine" and compiler.destroyed
    compiler.source = None
    assert native.compile_source(file, "sm_90a") == CUBIN
    assert compiler.source is None


def test_the_compilers_words_are_in_the_error(compiler, tmp_path):
    with pytest.raises(native.BuildError, match=r"NVRTC failed: line 1: x\Z"):
        native.compile_source(source_of(tmp_path, b"an error"), "sm_90a")
    assert compiler.destroyed


def test_a_kernel_that_cannot_be_built_is_none_with_one_warning(monkeypatch, compiler, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    file = source_of(tmp_path, b"an error")
    native.load.cache_clear()
    with caplog.at_level(logging.WARNING, "deepinfer"):
        assert [native.load(file, "f", 128, 0, 0) for _ in range(3)] == [None] * 3
    native.load.cache_clear()
    assert [record.message for record in caplog.records] == [
        "no CUDA C++ kernel of some: NVRTC failed: line 1: x; Triton's, which is slower, takes its place"
    ]


def test_a_missing_nvrtc_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "0.7")
    with pytest.raises(native.BuildError, match=r"libnvrtc.so.0 not found; it comes with CUDA builds of torch"):
        native._nvrtc.__wrapped__()


def test_a_launch_packs_addresses_and_numbers_and_sets_the_memory_of_the_kernel(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(native, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    kernel = native.Kernel(CUBIN, "f", 512, 200_000, 7)
    x = torch.zeros(4)
    kernel.launch((3, 2, 1), (x, -5, None, 1e-6, 0.0))
    assert struct.unpack("3q2d", driver.packed) == (x.data_ptr(), -5, 0, 1e-6, 0.0)
    names = [name for name, _ in driver.calls]
    assert names == ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"]
    assert driver.calls[2][1][1:] == (native.MAX_DYNAMIC_SHARED, 200_000)
    assert len(driver.config) == 56
    *sizes, at, count = native.CONFIG.unpack(driver.config)
    assert sizes == [3, 2, 1, 512, 1, 1, 200_000, 77] and count == 1
    early = native.Attribute.from_address(at)  # it may start before the kernel before it has ended
    assert (early.id, early.value, ctypes.sizeof(early)) == (6, 1, 72)


@pytest.mark.parametrize("refuses", ["cuModuleLoadData", "cuFuncSetAttribute", "cuLaunchKernelEx"])
def test_a_refusal_of_the_driver_is_named(monkeypatch, refuses):
    monkeypatch.setattr(native, "_driver", lambda: FakeDriver(refuses))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    with pytest.raises(native.BuildError, match=f"{refuses} failed: out of resources"):
        native.Kernel(CUBIN, "f", 128, 0, 0).launch((1, 1, 1), ())


def test_the_sizes_in_python_are_those_of_the_source():
    text = (attention.WIDE_SOURCE.parent / "attention.cuh").read_text()
    sizes = f"HEADS = {attention.WIDE_HEADS}, KEYS = {attention.SHARE_KEYS}, MAX_TURNS = {attention.WIDE_TURNS};"
    assert f"DIM = {attention.WIDE_DIM}, {sizes}" in text and f"GROUP_HEADS = {attention.WIDE_GROUP};" in text
    assert "THREADS = 4 * GROUP" in text and attention.WIDE_THREADS == 4 * 128
    assert "PITCH = 2 * ENTRY_ROW + 16, SLOT = 8 * PITCH;" in text
    matrices, packed = 5 * 32768 + 2 * 8192, 4 * 2 * 8 * (2 * 288 + 16)
    numbers = 4 * 8 * attention.WIDE_TURNS + 4 * 4 * attention.WIDE_HEADS + 8 * 32 + 8 * 8 + 2 * 2 * 32
    assert attention.WIDE_SHARED_BYTES == matrices + packed + numbers <= 232_448


def has_nvrtc() -> bool:
    try:
        native._nvrtc()
    except native.BuildError:
        return False
    return True


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("file", sorted(attention.WIDE_SOURCE.parent.glob("*.cu")), ids=lambda file: file.stem)
def test_every_source_compiles_by_nvrtc(file):
    assert native.compile_source(file, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("file", sorted(attention.WIDE_SOURCE.parent.glob("*.cu")), ids=lambda file: file.stem)
def test_every_source_compiles_for_hopper_with_its_matrix_instructions_in_parallel(file, tmp_path):
    command = ["nvcc", "-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-o", str(tmp_path / "made"), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stderr  # ptxas found too few registers to keep products in flight
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr))) <= 320
