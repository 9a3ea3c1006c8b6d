"""Answers that can be retrieved: those that run, and the last that ended."""

import json

import pytest

from deepinfer.serve import response_store
from deepinfer.serve.errors import ApiError, ClientLeft
from deepinfer.serve.response_store import ResponseStore, Stored


class FakeStream:
    def __init__(self):
        self.is_finished, self.finish_reason, self.num_tokens = False, None, 5
        self.request = type("Request", (), {"token_ids": [1, 2, 3]})()

    def response(self):
        return json.dumps({"status": "completed" if self.is_finished else "in_progress", "incomplete_details": None})

    def end(self, reason="stop"):
        self.is_finished, self.finish_reason = True, reason


class FakeExchange:
    is_closed, failure = False, None


def stored(name):
    return Stored(FakeStream(), FakeExchange(), name, {"store": True})


def test_the_oldest_that_ended_are_forgotten_and_those_that_run_stay(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_KEPT", 2)
    store, running = ResponseStore(), stored("running")
    store.add(running, is_kept=True)
    for number in range(4):
        one = stored(str(number))
        store.add(one, is_kept=True)
        one.stream.end()
    store.add(stored("last"), is_kept=True)
    assert [store.get(name) is not None for name in ("running", "0", "1", "2", "3", "last")] == (
        [True, False, False, True, True, True]
    )
    monkeypatch.setattr(response_store, "MAX_KEPT_TOKENS", 8)
    store.add(stored("next"), is_kept=True)
    assert store.get("2") is None and store.get("3") is not None


def test_what_is_not_to_be_kept_is_found_while_it_runs():
    store, one = ResponseStore(), stored("a")
    store.add(one, is_kept=False)
    assert store.get("a") is one
    one.stream.end()
    assert store.get("a") is None
    store.add(stored("b"), is_kept=True)
    store.remove("b")
    assert store.get("b") is None and store.get("never") is None


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda one: None, "in_progress"),
        (lambda one: one.stream.end(), "completed"),
        (lambda one: one.stream.end("abort"), "cancelled"),
        (lambda one: setattr(one, "is_cancelled", True), "cancelled"),
        (lambda one: setattr(one._exchange, "is_closed", True), "cancelled"),
        (lambda one: setattr(one._exchange, "failure", ClientLeft()), "in_progress"),
        (lambda one: setattr(one._exchange, "failure", ApiError(500, "broken")), "failed"),
    ],
)
def test_the_status_says_what_became_of_it(change, status):
    one = stored("a")
    change(one)
    assert one.body()["status"] == status and one.body()["store"] is True
    assert status != "failed" or one.body()["error"]["message"] == "broken"
