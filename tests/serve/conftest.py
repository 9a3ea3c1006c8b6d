"""Servers that many tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from serve_client import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """The small model, with the defaults of `deepinfer serve`."""
    with running() as one:
        yield one


@pytest.fixture(scope="session")
def null() -> Iterator[Running]:
    """No model behind it: tokens are hashes of seed and prompt. Has keys and is strict."""
    with running({"device": "null", "max_queue": 4}, ("first-key", "second-key"), strict_fields=True) as one:
        one.http.headers["authorization"] = "Bearer first-key"
        yield one


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.openai() as one:
        yield one
