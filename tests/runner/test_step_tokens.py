"""How many tokens a step has where nobody says."""

from __future__ import annotations

from typing import Any

import pytest

import goldens
from backends.cpu import pair
from deepinfer.config.engine import EngineConfig
from deepinfer.runner.build import build_runner


@pytest.mark.parametrize(
    ("options", "expected", "prefill"),
    [
        ({"device": "cpu", "load_format": "dummy"}, 512, 128),
        ({"device": "null"}, 2048, 2048),
        ({"device": "cpu", "load_format": "dummy", "max_num_requests": 600}, None, 128),
        ({"device": "null", "max_num_requests": 4000}, None, None),
        ({"device": "cpu", "load_format": "dummy", "max_step_tokens": 2048}, 2048, 128),
        ({"device": "cpu", "load_format": "dummy", "max_prefill_tokens": 300}, 512, 300),
        ({"device": "null", "max_step_tokens": 64}, 64, 64),
    ],
)
def test_a_step_suits_the_device_and_what_runs_in_it(
    options: dict[str, Any], expected: int | None, prefill: int | None
) -> None:
    """expected, prefill: None = what an image needs beside all other requests."""
    config = EngineConfig.from_options({"num_blocks": 1, **options})
    with pair.tiles(False):  # with tiles prompts take more of a step, see tests/backends/test_select.py
        built = build_runner(config, goldens.CHECKPOINT)
    assert built.images is not None
    beside = options.get("max_num_requests", 64) - 1 + built.images.max_tokens
    assert (built.max_step_tokens, built.max_prefill_tokens) == (expected or beside, prefill or beside)
