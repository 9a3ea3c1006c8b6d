from pathlib import Path

import pytest

import deepinfer
from deepinfer.frontend.tokenizer import Tokenizer

NANO = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(NANO)
