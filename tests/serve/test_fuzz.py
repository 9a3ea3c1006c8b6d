"""Random bodies get answers of the protocol and nothing else; `benchmarks/serve/hostile.py` sends many more."""

import importlib.util
import random
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "serve" / "hostile.py"


@pytest.fixture(scope="module")
def hostile():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))
        spec = importlib.util.spec_from_file_location("hostile", PATH)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def test_random_bodies_are_refused_or_answered(server, hostile):
    random.seed(11)
    statuses = set()
    for _ in range(150):
        path, data = hostile.body()
        response = server.http.post(path, content=data)
        statuses.add(response.status_code)
        assert response.status_code < 500, (path, data[:500], response.text)
    assert {200, 400} <= statuses and server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [1%s]}' % (b"0" * 400)),
        ("/v1/messages/count_tokens", b'{"messages": [1%s]}' % (b"0" * 400)),
        ("/v1/responses", rb'{"input": "a", "stop": "\ud800"}'),
    ],
)
def test_bodies_that_once_were_internal_errors_are_refused(server, path, data):
    assert server.http.post(path, content=data).status_code == 400
