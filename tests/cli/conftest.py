import pytest

from cli.fake_llm import FakeLLM

COMMANDS = ("bench", "chat", "eval", "generate")


@pytest.fixture
def llm(monkeypatch):
    """The engine that every command opens in this test."""
    fake = FakeLLM()
    for name in COMMANDS:
        monkeypatch.setattr(f"deepinfer.cli.{name}.open_llm", lambda args, **options: fake)
    return fake


@pytest.fixture
def type_in(monkeypatch):
    """Makes standard input a pipe with this text."""
    import io

    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))
