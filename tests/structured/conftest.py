from pathlib import Path

import pytest

import deepinfer
from deepinfer.structured.server import GrammarServer
from grammar_walker import Walker

NANO = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch):
    """Here the matcher runs in the tests' own process, which its timer would end."""
    monkeypatch.setattr("deepinfer.structured.matching.ROW_SECONDS", 1000.0)


@pytest.fixture(scope="session")
def walker():
    return Walker()


@pytest.fixture(scope="module")
def server():
    server = GrammarServer(NANO, 4096, [1])
    yield server
    server.close()
