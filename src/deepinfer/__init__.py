"""deepinfer: an inference engine for DeepSeek-V4.1.

    from deepinfer import LLM, SamplingParams

    with LLM() as llm:
        print(llm.chat([{"role": "user", "content": "What is 12 + 30?"}])[0].content)

Names are loaded when they are first used, so `import deepinfer` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepinfer.__about__ import __version__

if TYPE_CHECKING:
    from deepinfer.config.engine import EngineConfig
    from deepinfer.errors import (
        CheckpointError,
        ConfigError,
        DeepInferError,
        EngineDeadError,
        ModelError,
        QueueFullError,
        RequestError,
        ShapeError,
    )
    from deepinfer.frontend.outputs import ChatOutput, RequestOutput
    from deepinfer.llm import LLM
    from deepinfer.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "ChatOutput",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "EngineConfig",
    "EngineDeadError",
    "ModelError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ShapeError",
    "__version__",
]

_HOMES = {
    "LLM": "deepinfer.llm",
    "ChatOutput": "deepinfer.frontend.outputs",
    "RequestOutput": "deepinfer.frontend.outputs",
    "EngineConfig": "deepinfer.config.engine",
    "SamplingParams": "deepinfer.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES.get(name, "deepinfer.errors")), name)
