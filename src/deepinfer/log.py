"""Loggers under the name `deepinfer`, and warnings that are given once."""

from __future__ import annotations

import functools
import logging


def get(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup(level: str = "INFO") -> None:
    """Print this package's log lines to standard error (command line use; a library never calls it)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("deepinfer")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


@functools.cache
def warn_once(name: str, message: str) -> None:
    """Log a warning the first time this (logger, message) pair is seen."""
    get(name).warning(message)
