"""Where there is no CUDA device, kernels run in Triton's interpreter; it must be told before they are defined."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch


def _take_scalars_as_bounds() -> None:
    """Triton 3.6 turns a scalar into a loop's bound in a way that newer numpy refuses; later versions squeeze it."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):  # the tests say that they are skipped
        _take_scalars_as_bounds()
