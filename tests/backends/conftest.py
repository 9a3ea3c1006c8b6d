"""Random numbers that no test gives a seed are the same every time too."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def own_numbers() -> None:
    torch.manual_seed(0)
