"""Prompts with images for the golden checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

import goldens
from images.pictures import picture

TOKEN = 639  # stands for an image


def prompts(count: int) -> list[dict[str, Any]]:
    """Different prompts of one to three images and text between them."""
    draw, text = np.random.default_rng(count), goldens.prompt(200).tokens
    found = []
    for number in range(count):
        ids, images = [0], []
        for place in range(number % 3 + 1):
            width, height = draw.integers(20, 160, 2).tolist()
            images.append(picture(width, height, seed=10 * number + place))
            at = int(draw.integers(0, 100))
            ids += [*text[at : at + int(draw.integers(0, 20))], TOKEN]
        found.append({"prompt_token_ids": [*ids, *text[:5]], "images": images})
    return found
