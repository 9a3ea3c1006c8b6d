"""Pictures and files that the tests of images share."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from deepinfer.images.decode import ImageLimits
from deepinfer.images.geometry import ImageGeometry
from deepinfer.model.v41.config import ModelConfig

TESTS = Path(__file__).parents[1]
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
CONFIGS = {
    "golden": TESTS / "golden" / "nano" / "checkpoint" / "config.json",
    "nano": TESTS.parent / "src" / "deepinfer" / "data" / "deepinfer-nano" / "config.json",
    "flash": TESTS / "config-flash.json",
}


def geometry(model: str) -> ImageGeometry:
    """How images are prepared for one of the models."""
    found = ModelConfig.from_file(CONFIGS[model]).images
    assert found is not None
    return found


def oracle_vision(model: str) -> dict:
    """The same as the oracle takes it."""
    return json.loads(CONFIGS[model].read_text())["vision_config"]


def picture(width: int = 130, height: int = 90, seed: int = 0) -> Image.Image:
    """Soft random colours, so that codecs and scaling have something to do."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (max(1, height // 10), max(1, width // 10), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **settings: object) -> bytes:
    """The bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()
