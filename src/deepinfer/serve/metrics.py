"""Prometheus metrics under `deepinfer:`, and the same under the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deepinfer.engine.stats import EngineStats
from deepinfer.messages import DraftCounts, Finished, GenerateRequest

PREFIX, ALIAS = "deepinfer:", "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """What is measured where tokens and ends come in; the engine's own counters are read when asked."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended")
        self._cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens found in the cache")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that requests received")
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival", TOKEN_SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between tokens", TOKEN_SECONDS)
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From arrival to the end", REQUEST_SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step", REQUEST_SECONDS)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", SIZES)
        self._ends = Counter(
            PREFIX + "request_success", "Requests that ended", ["model_name", "finished_reason"], registry=self.registry
        )
        for reason in REASONS:
            self._ends.labels(model, reason)
        self._http = Counter(
            PREFIX + "http_requests", "Answered HTTP requests", ["path", "status"], registry=self.registry
        )

    def token(self, request: GenerateRequest, last: float | None, now: float) -> None:
        """A request has its next token. last, now: seconds on `time.monotonic()`; last is None for the first one."""
        self._generation_tokens.inc()
        if last is None:
            self._first_token.observe(now - request.arrival)
        else:
            self._inter_token.observe(now - last)

    def finished(self, reason: str, request: GenerateRequest, ended: Finished | None) -> None:
        """A request ended; None: its client left or it was refused."""
        self._ends.labels(self._model, reason).inc()
        if ended is None:
            return
        times, num_prompt = ended.times, len(request.token_ids)
        self._prompt_tokens.inc(num_prompt)
        self._prompt_size.observe(num_prompt)
        self._cached_tokens.inc(ended.num_cached_tokens)
        self._end_to_end.observe(times.finished - times.arrival)
        if times.scheduled is not None:
            self._queue.observe(times.scheduled - times.arrival)

    def answered(self, path: str, status: int) -> None:
        """An HTTP request was answered. path: the route, not what the client wrote."""
        self._http.labels(path, str(status)).inc()

    def page(self, stats: EngineStats | None, num_restarts: int) -> bytes:
        """The whole page. stats: None while there is no engine."""
        page = CollectorRegistry()
        page.register(_Page(self.registry, self._model, stats, num_restarts))
        return generate_latest(page)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=tuple(buckets))
        return made.labels(self._model)


class _Page(Collector):
    """Everything at one moment, each family under both names."""

    def __init__(self, registry: CollectorRegistry, model: str, stats: EngineStats | None, num_restarts: int) -> None:
        self._registry, self._model, self._stats, self._num_restarts = registry, model, stats, num_restarts

    def collect(self) -> Iterable[Metric]:
        for family in (*self._registry.collect(), *self._engine()):
            yield family
            yield _renamed(family)

    def _engine(self) -> Iterable[Metric]:
        stats, page = self._stats, CollectorRegistry()
        used = 0.0 if stats is None else 1.0 - stats.num_free_blocks / max(stats.num_blocks, 1)
        values = {
            "engine_up": ("Whether the engine runs", float(stats is not None)),
            "engine_restarts": ("Engines that were started after the first one", float(self._num_restarts)),
            "num_requests_running": ("Requests in the running batch", 0.0 if stats is None else stats.num_running),
            "num_requests_waiting": ("Requests that wait", 0.0 if stats is None else stats.num_waiting),
            "kv_cache_usage_perc": ("Part of the cache blocks in use, 0 to 1", used),
        }
        for name, (text, value) in values.items():
            Gauge(PREFIX + name, text, ["model_name"], registry=page).labels(self._model).set(value)
        if stats is not None:
            totals = {
                "num_preemptions": ("Requests that gave up their blocks for others", stats.num_preemptions),
                "engine_steps": ("Steps since the engine started", stats.num_steps),
                "engine_tokens": ("Tokens that passed the model", stats.num_tokens),
                "engine_device_seconds": ("Time the device side worked", stats.device_seconds),
            }
            for name, (text, total) in totals.items():
                Counter(PREFIX + name, text, ["model_name"], registry=page).labels(self._model).inc(total)
        drafts = None if stats is None else stats.drafts
        return page.collect() if drafts is None else (*page.collect(), *self._drafts(drafts))

    def _drafts(self, counts: DraftCounts) -> Iterator[Metric]:
        """Speculation: over all, and by the place of a draft after the newest token."""
        totals = {
            "num_drafts": ("Steps of a request that checked drafts", counts.num_rows),
            "num_draft_tokens": ("Drafts that were checked", counts.checked.sum()),
            "num_accepted_tokens": ("Drafts that were accepted", counts.accepted.sum()),
        }
        for name, (text, total) in totals.items():
            family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=["model_name"])
            family.add_metric([self._model], float(total))
            yield family
        places = {"proposed": counts.proposed, "checked": counts.checked, "accepted": counts.accepted}
        for name, values in places.items():
            family = CounterMetricFamily(
                f"{PREFIX}spec_decode_num_{name}_tokens_per_pos", f"Drafts {name}", labels=["model_name", "position"]
            )
            for place, value in enumerate(values.tolist()):
                family.add_metric([self._model, str(place)], float(value))
            yield family
        text = "Mean distance between estimated and seen acceptance of drafts"
        gauge = GaugeMetricFamily(f"{PREFIX}spec_decode_calibration_error", text, labels=["model_name"])
        gauge.add_metric([self._model], counts.calibration_error)
        yield gauge


def _renamed(family: Metric) -> Metric:
    """The family under vLLM's prefix."""
    other = Metric(ALIAS + family.name.removeprefix(PREFIX), family.documentation, family.type)
    for sample in family.samples:
        name = ALIAS + sample.name.removeprefix(PREFIX)
        other.add_sample(name, sample.labels, sample.value, sample.timestamp, sample.exemplar)
    return other
