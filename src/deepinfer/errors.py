"""Every error that a user, a file or a peer can cause.

    DeepInferError
    |-- ConfigError          an option, flag or environment variable that cannot be accepted
    |-- ModelError           a config.json that this engine cannot run
    |-- CheckpointError      weights that are missing, unexpected, damaged or of the wrong kind
    |-- ShapeError           an op was called with tensors that do not fit together
    |-- RequestError         one request is refused; the engine and all others go on
    |   `-- QueueFullError   refused because too many requests wait already; try again later
    `-- EngineDeadError      the engine stopped; carries the first cause

A message names the thing, the value, the rule and the way out. Our own broken invariants are
`assert` statements, not exceptions of this tree.
"""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of all errors in this package that somebody else than its authors can cause."""


class ConfigError(DeepInferError, ValueError):
    """An option, flag or environment variable that cannot be accepted."""


class ModelError(DeepInferError, ValueError):
    """A model configuration that this engine cannot run."""


class CheckpointError(DeepInferError):
    """Weights that are missing, unexpected, damaged or of the wrong dtype or shape."""


class ShapeError(DeepInferError, ValueError):
    """Tensors given to an op do not fit together."""


class RequestError(DeepInferError, ValueError):
    """A request is refused; nothing of it was queued."""


class QueueFullError(RequestError):
    """A request is refused because the queue is full."""


class EngineDeadError(DeepInferError, RuntimeError):
    """The engine stopped and takes no more requests."""


def shown(value: object) -> str:
    """A value for a message: its repr in at most 80 characters, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, or an object that cannot be shown
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= 80 else text[:77] + "..."
