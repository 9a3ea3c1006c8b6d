"""CUDA C++ kernels: compiled for the card by NVRTC at first use, launched through the driver.

NVRTC comes with CUDA builds of torch, so no compiler need be installed. A kernel takes one struct,
by value, of 8-byte members: device addresses, integers and doubles. It may start while the kernel before it ends, and
waits for that itself (`begin` in hopper.cuh).
"""

from __future__ import annotations

import ctypes
import functools
import site
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer import log

logger = log.get(__name__)
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FLAGS = ("--std=c++17",)
POINTER_BYTES = 8


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


# CUlaunchConfig: grid, block, bytes of shared memory, stream, address of attributes and their number.
CONFIG = struct.Struct("7I2QI4x")
STARTS_EARLY = Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
EARLY_AT = ctypes.addressof(STARTS_EARLY)


class BuildError(Exception):
    """A kernel cannot be compiled or loaded on this machine; the message says why."""


class Kernel:
    """A kernel on one device, launched with a fixed number of threads and bytes of shared memory."""

    def __init__(self, image: bytes, name: str, threads: int, shared_bytes: int, device: int) -> None:
        """image: a cubin. Raises BuildError where the driver refuses it."""
        self._driver, self._threads, self._shared_bytes, self._device = _driver(), threads, shared_bytes, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), image)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        self._call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Tensor | int | float | None]) -> None:
        """Queue the kernel on the current stream; tensors are passed by address. Raises BuildError on refusal."""
        numbers = [value.data_ptr() if type(value) is Tensor else value or 0 for value in arguments]
        layout, memory = _layout(*map(type, numbers))
        packed = memory()
        config = ctypes.addressof(packed)
        parameters, stream = config + CONFIG.size, torch._C._cuda_getCurrentRawStream(self._device)
        sizes = *grid, self._threads, 1, 1, self._shared_bytes
        layout.pack_into(packed, 0, *sizes, stream, EARLY_AT, 1, parameters + POINTER_BYTES, *numbers)
        self._call("cuLaunchKernelEx", ctypes.c_void_p(config), self._function, ctypes.c_void_p(parameters), None)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise BuildError(f"{name} failed: {(text.value or b'unknown error').decode()}")


@functools.cache
def _layout(*types: type) -> tuple[struct.Struct, type[ctypes.Array[ctypes.c_char]]]:
    """A launch's configuration, a pointer, and a struct of these members that it is to point at; memory for all."""
    members = "".join("d" if member is float else "q" for member in types)
    layout = struct.Struct(f"{CONFIG.format}q{members}")
    return layout, ctypes.c_char * layout.size


@functools.cache
def compile_source(file: Path, architecture: str) -> bytes:
    """A CUDA C++ file -> its cubin for an architecture such as sm_90a. Raises BuildError with the compiler's words."""
    library = _nvrtc()
    program = ctypes.c_void_p()
    if library.nvrtcCreateProgram(ctypes.byref(program), file.read_bytes(), file.name.encode(), 0, None, None):
        raise BuildError("NVRTC cannot make a program")
    try:
        flags = [
            flag.encode() for flag in (*FLAGS, f"--gpu-architecture={architecture}", f"--include-path={file.parent}")
        ]
        failed = library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if failed:
            words = _text_of(library, program, "ProgramLog").rstrip(b"\0")
            raise BuildError(f"NVRTC failed: {words.decode()[-2000:]}")
        return _text_of(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def load(file: Path, name: str, threads: int, shared_bytes: int, device: int) -> Kernel | None:
    """The kernel `name` of a source file on a device; None, with one warning, where it cannot be built there."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context, if nothing has used it before
            return Kernel(compile_source(file, f"sm_{major}{minor}a"), name, threads, shared_bytes, device)
    except BuildError as error:
        logger.warning("no CUDA C++ kernel of %s: %s; Triton's, which is slower, takes its place", file.stem, error)
        return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a card: as many blocks run at a time, or a multiple."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def memory_bytes(device: torch.device) -> int:
    """All memory of a card; 0 of a device that is none."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _text_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, text)
    return text.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"no CUDA driver ({error})") from error


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version: where the loader finds it, else beside torch's other CUDA packages."""
    major = (torch.version.cuda or "").partition(".")[0] or "*"
    name = f"libnvrtc.so.{major}"
    folders = [Path(torch.__file__).parents[1], *map(Path, site.getsitepackages())]
    found = [str(file) for folder in folders for file in sorted(folder.glob(f"nvidia/*/lib/{name}"))]
    for file in (name, *found):
        try:
            return ctypes.CDLL(file)
        except OSError:
            continue
    raise BuildError(f"{name} not found; it comes with CUDA builds of torch")
