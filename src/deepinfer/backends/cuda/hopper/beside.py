"""Work beside other work, on a second stream, in steps that are captured.

Kernels that are launched one by one stay on one stream: the host would be busy with events for longer than is won.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def beside(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Queue some work; in a captured step it runs beside what is queued until its result is asked for.

    What it reads must last until then. Its memory is the second stream's, which uses it again for work that is queued
    after the result was read.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        result = work()
        return lambda: result
    main = torch.cuda.current_stream()
    side = _second_stream(main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made = work()

    def joined() -> Tensor:
        main.wait_stream(side)
        return made

    return joined


@functools.cache
def _second_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream, since engines of one process may capture at the same time."""
    return torch.cuda.Stream(main.device)
