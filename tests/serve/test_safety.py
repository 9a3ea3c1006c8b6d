"""Keys, limits, hostile bodies, and clients that leave."""

import json
import random
import socket
import time

import pytest

import goldens
from deepinfer.serve import body as bodies
from deepinfer.serve.body import MAX_TOTAL_BYTES, Budget
from deepinfer.serve.errors import ApiError
from serve_client import PATIENCE, running, wait_until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize("headers", [{"authorization": "Bearer first-key"}, {"authorization": "bearer second-key"},
                                     {"x-api-key": "second-key", "authorization": ""}])  # fmt: skip
def test_any_of_the_keys_opens_the_door(null, headers):
    assert null.http.post(CHAT, json=HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/generate", "/abort", "/nothing"])
def test_without_a_key_the_door_stays_shut(null, path, value):
    response = null.http.request("POST" if path == CHAT else "GET", path, headers={"authorization": value})
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"


def test_health_and_version_need_no_key(null):
    for path in ("/health", "/ready", "/version"):
        assert null.http.get(path, headers={"authorization": ""}).status_code == 200


def test_strict_server_refuses_unknown_fields_and_a_lenient_one_takes_them(null, server):
    refused = null.post(CHAT, **HELLO, tempratur=1)
    assert refused.status_code == 400 and "unknown field 'tempratur'" in refused.json()["error"]["message"]
    assert null.post(CHAT, **HELLO, user="me", store=False, metadata={}).status_code == 200
    assert server.post(CHAT, **HELLO, tempratur=1).status_code == 200


DEEP = b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
WIDE = b'{"messages": [' + b"[]," * 2**21 + b"[]]}"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff{}", 400, "invalid_json"),
        ('{"messages": "ü"}'.encode("utf-16"), 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'{"temperature": 1e999, "messages": []}', 400, "invalid_request"),
        (DEEP, 400, "too_deep"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, 400, "too_deep"),
        (WIDE, 400, "too_many_values"),
        (b"x" * (2**25 + 1), 413, "body_too_long"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_a_hostile_body_is_refused_and_nothing_else_happens(server, data, status, code):
    response = server.http.post(CHAT, content=data)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert server.is_idle()


def test_a_body_without_a_stated_length_is_cut_off(server):
    def parts():
        for _ in range(64):
            yield b" " * 2**20

    assert server.http.post(CHAT, content=parts()).status_code == 413


def test_a_body_that_does_not_come_to_its_end_is_given_up(server, monkeypatch):
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        told = client.recv(65536)
    assert told.startswith(b"HTTP/1.1 408") and server.service.budget._left == MAX_TOTAL_BYTES


def test_a_full_queue_is_told_with_a_time_to_come_back():
    with running({"device": "null", "max_queue": 2, "max_num_requests": 1}) as one:
        response = one.post("/v1/completions", prompt=[5], n=4, temperature=1)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert one.post("/v1/completions", prompt=[5], n=2, temperature=1).status_code == 200


def test_a_request_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr("deepinfer.serve.answer.REFUSAL_SECONDS", 0.0)  # the headers of a stream come at once
    with running({"device": "null", "model": str(goldens.CHECKPOINT), "num_blocks": 256}, request_seconds=1.0) as one:
        body = {"prompt": [5], "max_tokens": 32_000, "ignore_eos": True}
        response = one.post("/v1/completions", **body)
        assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"
        assert one.events("/v1/completions", **body)[-1]["error"]["code"] == "timeout"
        wait_until(one.is_idle)


def test_other_origins_are_not_let_in(server):
    response = server.http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in response.headers


def test_an_allowed_origin_may_use_every_method():
    with running({"device": "null"}, allowed_origin=("http://friend.example",)) as one:
        for method in ("GET", "POST", "DELETE"):
            headers = {"origin": "http://friend.example", "access-control-request-method": method}
            answer = one.http.options("/v1/responses/resp_1", headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["access-control-allow-origin"] == "http://friend.example"


def leave(server, body, seconds):
    """Ask, read for a while, and hang up."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        time.sleep(seconds)


@pytest.mark.parametrize("is_stream", [True, False])
def test_dropped_clients_free_their_requests(server, is_stream):
    random.seed(7)
    num_tokens = server.service.link.stats.num_generated_tokens
    for _ in range(12):
        body = {"prompt": "a " * random.randint(1, 200), "max_tokens": 1500, "ignore_eos": True, "stream": is_stream}
        leave(server, body, random.choice([0.001, 0.02, 0.1]))
    wait_until(server.is_idle)
    assert server.service.link.stats.num_generated_tokens - num_tokens < 12 * 1500 / 2


def test_many_large_bodies_at_once_are_refused_before_they_fill_the_memory():
    budget = Budget(100)
    budget.take(60)
    with pytest.raises(ApiError) as caught:
        budget.take(41)
    assert caught.value.status == 429 and caught.value.headers["retry-after"]
    budget.give(60)
    budget.take(100)


def test_a_refused_body_gives_its_bytes_back(server):
    left = server.service.budget._left
    for data in (b"{", DEEP, b" " * 2**25 + b"x"):
        server.http.post(CHAT, content=data)
    assert server.service.budget._left == left == MAX_TOTAL_BYTES
