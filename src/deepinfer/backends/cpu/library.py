"""The native library: one object whose attributes are its functions.

Calls release the GIL. Tensors go in as `data_ptr()`, prepared weights as the address of a C struct.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from deepinfer import log
from deepinfer.backends.cpu.build import BuildError, library_file

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Arguments of every function; all of them return nothing.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "set_num_threads": (LONG,),
    "multiply": (POINTER, LONG, LONG, POINTER, POINTER),
}


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None, after one warning, where that is not possible."""
    try:
        library = ctypes.CDLL(str(library_file()))
    except (BuildError, OSError) as error:
        log.warn_once(
            __name__, f"the native CPU ops are not available: {error}. Models run on torch, several times slower"
        )
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def function(name: str) -> Callable[..., None]:
    """One function of the loaded library."""
    library = load()
    assert library is not None, "native ops are offered only where the library is there"
    found: Callable[..., None] = getattr(library, name)
    return found
