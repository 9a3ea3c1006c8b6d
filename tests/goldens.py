"""The golden checkpoint and its expected values, and how two sets of logits are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

ROOT = Path(__file__).parent / "golden" / "nano"
CHECKPOINT = ROOT / "checkpoint"
LENGTHS = (1, 2, 5, 17, 33, 200)


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt, its greedy text under `exact`, and how much of that every precision agrees on."""

    tokens: list[int]
    greedy: list[int]
    steady: int


@cache
def prompt(length: int) -> GoldenPrompt:
    case = json.loads((ROOT / "goldens" / "goldens.json").read_text())["prompts"][str(length)]
    return GoldenPrompt(case["tokens"], case["greedy"], case["steady"])


@cache
def _all_logits() -> dict[str, NDArray[np.float32]]:
    return load_file(ROOT / "goldens" / "logits.safetensors")


def logits(length: int, precision: str) -> NDArray[np.float32]:
    """[length, vocab] float32."""
    return _all_logits()[f"{length}.{precision}"]


def relative_difference(ours: NDArray[np.float32], golden: NDArray[np.float32]) -> NDArray[np.float64]:
    """Per position: norm of the difference over the norm of the golden logits."""
    difference = np.linalg.norm(ours.astype(np.float64) - golden, axis=-1)
    return difference / np.linalg.norm(golden.astype(np.float64), axis=-1)
