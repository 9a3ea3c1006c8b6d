"""Traces: spans of requests for an OpenTelemetry collector. Loaded only when there is one to send them to.

A POST request is a span, below the caller's own if a `traceparent` header names it; each answer in it is a span
`llm_request` below that, with the attributes of OpenTelemetry's conventions and those that vLLM gives it. No span
holds a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import Token

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deepinfer.__about__ import __version__
from deepinfer.frontend.stream import RequestStream
from deepinfer.messages import Finished


class Traces:
    """Sends spans to `endpoint` (OTLP over HTTP, protobuf) from a thread of its own; dropped if nobody is there.

    model: the name that answers carry.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        resource = Resource.create({"service.name": "deepinfer", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("deepinfer", __version__)
        self._callers, self._model = TraceContextTextMapPropagator(), model

    def begin(self, headers: Mapping[str, str]) -> tuple[Span, Token[Context]]:
        """A request came in; what the same task does belongs to it until `end`."""
        span = self._tracer.start_span("POST", self._callers.extract(headers), SpanKind.SERVER)
        return span, context.attach(trace.set_span_in_context(span))

    def end(self, begun: tuple[Span, Token[Context]], path: str, status: int, request_id: str) -> None:
        """It was answered. path: the route, not what the client wrote."""
        span, token = begun
        span.update_name(f"POST {path}")
        span.set_attributes({
            "http.request.method": "POST", "http.route": path, "http.response.status_code": status,
            "http.request.header.x-request-id": request_id,
        })  # fmt: skip
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()
        context.detach(token)

    def current(self) -> Context:
        """Where spans of this task's request belong."""
        return context.get_current()

    def answer(self, parent: Context, name: str, stream: RequestStream, reason: str, ended: Finished | None) -> None:
        """An answer is over. name: its id. ended: None = the engine did not have it to its end."""
        request, times = stream.request, None if ended is None else ended.times
        params = request.params
        span = self._tracer.start_span("llm_request", parent, start_time=_wall_ns(request.arrival))
        span.set_attributes({
            "gen_ai.response.model": self._model, "gen_ai.response.id": name, "gen_ai.request.id": name,
            "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens or 0, "gen_ai.request.n": params.n,
            "gen_ai.usage.input_tokens": len(request.token_ids), "gen_ai.usage.prompt_tokens": len(request.token_ids),
            "gen_ai.usage.output_tokens": len(stream.token_ids),
            "gen_ai.usage.completion_tokens": len(stream.token_ids),
            "gen_ai.response.finish_reasons": [reason],
        })  # fmt: skip
        if ended is not None and times is not None:
            span.set_attribute("gen_ai.usage.cached_tokens", ended.num_cached_tokens)
            span.set_attribute("gen_ai.latency.e2e", times.finished - times.arrival)
            if times.scheduled is not None:
                span.set_attribute("gen_ai.latency.time_in_queue", times.scheduled - times.arrival)
            if times.first_token is not None:
                span.set_attribute("gen_ai.latency.time_to_first_token", times.first_token - times.arrival)
                span.add_event("first token", timestamp=_wall_ns(times.first_token))
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(None if times is None else _wall_ns(times.finished))

    def close(self) -> None:
        """Send what waits, and stop."""
        self._provider.shutdown()


def _wall_ns(moment: float) -> int:
    """Nanoseconds since 1970 of a time on `time.monotonic()`."""
    # The greatest of some differences: one is too small if this thread sleeps between the two clocks.
    return max(time.time_ns() - time.monotonic_ns() for _ in range(3)) + round(1e9 * moment)
