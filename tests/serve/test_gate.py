"""What every request leaves behind: a line in the log, and a count."""

import json
import logging
import sys

from deepinfer.log import JsonLines
from serve_client import wait_until

HELLO = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2}
WRONG = {"tempratur": 3, "chat_template_kwargs": {"thinkng": True}}


def line_of(caplog, request_id):
    """The record of the one request of that id; it is written after the answer, as those of other tests may be."""

    def found():
        lines = [record for record in caplog.records if record.name == "deepinfer.serve.gate"]
        return [record for record in lines if record.fields["request_id"] == request_id]

    wait_until(found)
    (record,) = found()
    return record


def test_a_request_leaves_a_line_without_its_contents(server, caplog):
    caplog.set_level(logging.INFO, "deepinfer.serve.gate")
    server.http.post("/v1/chat/completions", json={**HELLO, **WRONG}, headers={"x-request-id": "mine"})
    record = line_of(caplog, "mine")
    line = json.loads(JsonLines().format(record))
    assert line["request_id"] == "mine" and line["status"] == 200 and line["path"] == "/v1/chat/completions"
    assert line["ignored_fields"] == ["'tempratur'", "'chat_template_kwargs.thinkng'"]
    assert line["level"] == "info" and line["seconds"] > 0
    assert "secret" not in json.dumps(line) + record.getMessage()


def test_a_path_cannot_forge_a_line(server, caplog):
    caplog.set_level(logging.INFO, "deepinfer.serve.gate")
    server.http.get("/a%0Ab", headers={"x-request-id": "forged"})
    record = line_of(caplog, "forged")
    assert "\n" not in record.getMessage() and "/a\\nb" in record.getMessage()


def test_requests_are_counted_by_route_not_by_what_clients_write(server):
    server.http.get("/v1/models/one")
    server.http.get("/no-such-path-1")
    page = server.http.get("/metrics").text
    assert 'deepinfer:http_requests_total{path="/v1/models/{name:path}",status="404"}' in page
    assert "no-such-path" not in page and 'path="unknown",status="404"' in page


def test_exceptions_are_part_of_a_json_line():
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert line["message"] == "it broke" and "ValueError: x" in line["exception"]
