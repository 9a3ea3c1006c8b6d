"""The only reader of the environment. Nothing in the package writes to it."""

from __future__ import annotations

import os

PREFIX = "DEEPINFER_"


def deepinfer_variables() -> dict[str, str]:
    """All variables that start with `DEEPINFER_`, as they stand now."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def get(name: str, default: str | None = None) -> str | None:
    """One variable, or `default` when it is not set."""
    return os.environ.get(name, default)
