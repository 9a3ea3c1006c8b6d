"""The sampling parameters that a model's own files recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.errors import ModelError, RequestError
from deepinfer.sampling.params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p")


def default_params(folder: Path) -> SamplingParams:
    """What generation_config.json says; `do_sample: false` means greedy. Without that file, the class's defaults.

    Raises ModelError for a file that cannot be read or holds a value out of range.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content.get("do_sample") is False:
            return SamplingParams(temperature=0.0)
        return SamplingParams(**{name: content[name] for name in FIELDS if content.get(name) is not None})
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, RequestError) else f"it cannot be read: {error}"
        raise ModelError(f"{file}: {reason}; correct or remove the file") from None
