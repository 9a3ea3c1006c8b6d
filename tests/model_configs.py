"""The three config.json files that tests read: released, golden and the bundled small model."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer.model.v41.config import ModelConfig

TESTS = Path(__file__).parent
NANO = TESTS.parent / "src" / "deepinfer" / "data" / "deepinfer-nano"
GOLDEN = TESTS / "golden" / "nano" / "checkpoint"
RELEASED = TESTS / "config-flash.json"
FILES = {"released": RELEASED, "golden": GOLDEN / "config.json", "nano": NANO / "config.json"}


@cache
def config(name: str) -> ModelConfig:
    return ModelConfig.from_file(FILES[name])


def values(name: str) -> dict[str, Any]:
    """The file's content, the caller's to change."""
    return copy.deepcopy(_read(name))


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads(FILES[name].read_text())
