"""Traces, as a collector gets them over HTTP."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.config.serve import ServeOptions
from deepinfer.errors import ConfigError
from deepinfer.serve.run import build_service
from serve_client import running, wait_until

pytest.importorskip("opentelemetry.sdk", reason="traces need opentelemetry-sdk (the extra trace)")
service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="traces need opentelemetry-exporter-otlp-proto-http (the extra trace)",
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"prompt": "my secret", "max_tokens": 3, "n": 2, "temperature": 1, "ignore_eos": True}
DROPPED = {"max_tokens": 6000, "n": 1, "stream": True}


@pytest.fixture
def collector():
    """A URL, and the spans that were sent there."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            for resource in service.ExportTraceServiceRequest.FromString(data).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def values(span):
    kinds = ("string_value", "int_value", "double_value")
    return {
        pair.key: next((getattr(pair.value, kind) for kind in kinds if pair.value.HasField(kind)), None)
        for pair in span.attributes
    }


def test_a_request_and_its_answers_are_spans_below_the_callers(collector):
    endpoint, spans = collector
    with running({"device": "null"}, otlp_traces_endpoint=endpoint) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        reply = server.http.post("/v1/completions", json=ASK, headers=headers)
        assert reply.status_code == 200, reply.text
        assert server.http.get("/health").status_code == 200
        assert server.http.post("/v1/completions", json={"prompt": 7}).status_code == 400
        with server.http.stream("POST", "/v1/completions", json={**ASK, **DROPPED}) as stream:
            assert stream.status_code == 200, stream.read()
        wait_until(server.is_idle)
    by_trace = [span for span in spans if span.trace_id.hex() == TRACE]
    (request,) = (span for span in by_trace if span.name == "POST /v1/completions")
    answers = [span for span in by_trace if span.name == "llm_request"]
    assert len(by_trace) == 3 and request.parent_span_id.hex() == PARENT
    assert values(request)["http.response.status_code"] == 200
    assert values(request)["http.request.header.x-request-id"] == "mine"
    for answer in answers:
        told = values(answer)
        assert answer.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= answer.start_time_unix_nano < answer.end_time_unix_nano
        assert told["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"] == 3
        assert (
            told["gen_ai.usage.input_tokens"] == reply.json()["usage"]["prompt_tokens"]
            and told["gen_ai.request.max_tokens"] == 3
        )
        assert told["gen_ai.request.id"].startswith("cmpl-") and told["gen_ai.latency.e2e"] > 0
        assert told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    others = sorted(span.name for span in spans if span.trace_id.hex() != TRACE)
    assert others == ["POST /v1/completions"] * 2 + ["llm_request"], "the one that was refused, and the dropped one"
    assert not any(b"secret" in span.SerializeToString() for span in spans)


def test_without_the_extra_the_option_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "deepinfer.serve.traces", raising=False)
    options = ServeOptions(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="opentelemetry.*install deepinfer with its extra .trace"):
        build_service(EngineConfig.from_options({"device": "null"}), options)
