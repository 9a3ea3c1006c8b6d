"""The native library and the types of its functions.

Tensors go in as `data_ptr()`, prepared weights as the address of a C struct.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, TypeVar

from deepinfer import log
from deepinfer.backends.cpu.build import BuildError, library_file

Library = TypeVar("Library", bound=ctypes.CDLL)
POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Result, then arguments. A LONG result is 0, or not when an index points outside of what it should.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "set_num_threads": (None, LONG),
    "tile_parts": (LONG,),
    "set_tile_parts": (None, LONG),
    "stays_packed": (LONG, LONG, POINTER, LONG),
    "pack": (None, POINTER, LONG, LONG, POINTER),
    "multiply": (None, POINTER, LONG, LONG, POINTER, POINTER),
    "embed": (LONG, POINTER, LONG, POINTER, LONG, LONG, LONG, POINTER, POINTER),
    "head": (None, POINTER, POINTER, POINTER, LONG, LONG, POINTER),
    "hyper_enter": (None, POINTER, POINTER, POINTER, LONG, POINTER, POINTER, POINTER, POINTER),
    "hyper_leave": (None, POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, POINTER),
    "attention_inputs": (None, POINTER, POINTER, LONG, POINTER, LONG, POINTER, POINTER, POINTER),
    "main_rows": (None, POINTER, POINTER, LONG, POINTER, LONG, POINTER),
    "tap": (None, POINTER, LONG, LONG, LONG, POINTER, LONG),
    "draft_main": (None, POINTER, POINTER, LONG, POINTER),
    "draft_next": (LONG, POINTER, POINTER, LONG, POINTER, LONG, POINTER, LONG, POINTER, POINTER),
    "project_out": (None, POINTER, POINTER, LONG, POINTER),
    "pack_rows": (None, POINTER, LONG, LONG, LONG, POINTER),
    "unpack_rows": (None, POINTER, LONG, LONG, LONG, POINTER),
    "attend": (None, *(POINTER,) * 6, LONG, POINTER, POINTER, LONG, LONG, LONG, LONG, POINTER),
    "store_ring": (None, POINTER, POINTER, POINTER),
    "compress": (None, POINTER, POINTER, LONG, POINTER, POINTER, POINTER, POINTER),
    "select_entries": (None, POINTER, POINTER, LONG, *(POINTER,) * 4, LONG, LONG, POINTER, LONG, POINTER, LONG),
    "ngram_rows": (LONG, POINTER, POINTER, POINTER, POINTER, POINTER),
    "route": (None, POINTER, POINTER, LONG, POINTER, LONG, POINTER, POINTER),
    "experts": (LONG, POINTER, POINTER, LONG, POINTER, POINTER, LONG, LONG, POINTER),
    "shared_expert": (None, POINTER, POINTER, LONG, POINTER, LONG, POINTER),
    "run_layers": (LONG, POINTER, LONG, *(POINTER,) * 6),
    "run_model": (LONG, *(POINTER,) * 8),
    "read_tokens": (None, POINTER, POINTER, POINTER, LONG, POINTER),
    "write_tokens": (None, POINTER, POINTER, POINTER, LONG, POINTER),
    "read_table": (None, POINTER, LONG, POINTER, LONG, LONG, POINTER),
    "best_tokens": (None, POINTER, LONG, LONG, POINTER, POINTER),
    "engram": (LONG, POINTER, POINTER, POINTER, LONG, POINTER, LONG, POINTER),
}


@functools.cache
def native() -> ctypes.CDLL:
    """The library, compiled if need be; calls let go of the GIL. Raises BuildError or OSError if it cannot be had."""
    return _typed(ctypes.CDLL(str(library_file())))


@functools.cache
def short_native() -> ctypes.PyDLL:
    """The same library for calls that take a few microseconds and keep the GIL.

    Whoever else waits for the GIL (planning, answers) holds it for longer than that; it is theirs while
    layers run.
    """
    return _typed(ctypes.PyDLL(str(library_file())))


def _typed(library: Library) -> Library:
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def is_available() -> bool:
    """Whether the library is there; says once why not and what that costs."""
    try:
        native()
    except (BuildError, OSError) as error:
        log.warn_once(__name__, f"no native CPU ops: {error}. Models run on torch's ops, several times slower")
        return False
    return True
