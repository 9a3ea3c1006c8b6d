"""Which package runs an architecture: the one place to add a model version."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from deepinfer.errors import ModelError
from deepinfer.model.section import Section, read_json

PACKAGES = {"DeepseekV41ForCausalLM": "deepinfer.model.v41"}


def architecture_of(folder: Path) -> str:
    """The first known architecture that a folder's config.json names. Raises ModelError."""
    root = Section(read_json(folder / "config.json"))
    for name in root.texts("architectures"):
        if name in PACKAGES:
            return name
    root.refuse("architectures", f"this engine runs {', '.join(PACKAGES)}")


def load_module(architecture: str, part: str) -> ModuleType:
    """One module of an architecture's package, imported when asked for.

    part: "config" (`ModelConfig`), "caches" (`cache_layout`), "names" (`catalogue`), "weights"
    (`ModelWeights`), "model" (`Model`), "report" or "memory_plan"; only weights and model load torch.
    Raises ModelError for an unknown architecture.
    """
    if architecture not in PACKAGES:
        raise ModelError(f"architecture is {architecture!r}; this engine runs {', '.join(PACKAGES)}")
    return importlib.import_module(f"{PACKAGES[architecture]}.{part}")
