"""Loggers under the name `deepinfer`, and warnings that are given once."""

from __future__ import annotations

import functools
import json
import logging
import time
from typing import Any


def get(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup(level: str = "INFO", *, is_json: bool = False) -> None:
    """Print this package's log lines to standard error (command line use; a library never calls it).

    is_json: one JSON object a line, with what a record has under `fields`.
    """
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if is_json else plain)
    logger = logging.getLogger("deepinfer")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@functools.cache
def warn_once(name: str, message: str) -> None:
    """Log a warning the first time this (logger, message) pair is seen."""
    get(name).warning(message)
