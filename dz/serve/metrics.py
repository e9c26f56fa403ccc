"""Prometheus metrics: vLLM's names for what it measures too, `dz:` names for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dz.core.messages import Ready
from dz.serve.totals import Totals

disable_created_metrics()  # a second series beside each, which nobody reads
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
)
_FEW = (1, 2, 5, 10, 20, 50, 100)


class Engine(Protocol):
    """What the metrics read from the supervisor."""

    totals: Totals
    ready: Ready | None
    restarts: int

    @property
    def open(self) -> int:
        """Sequences submitted and not finished."""
        ...


class Metrics:
    """One registry for one server. The requests' own figures are observed here, the engine's are read when scraped."""

    def __init__(self, model: str, engine: Engine) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(_EngineCollector(list(self._labels.values()), engine))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            return made.labels(**self._labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self._registry).labels(**self._labels)

        self.ttft = histogram("time_to_first_token_seconds", "Seconds to the first token.", _SECONDS)
        self.itl = histogram("inter_token_latency_seconds", "Seconds between tokens of a sequence.", _SECONDS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first.", _SECONDS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.", _SECONDS)
        self.prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_lengths = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.max_tokens = histogram("request_params_max_tokens", "The max_tokens of a request.", _TOKENS)
        self.n = histogram("request_params_n", "The n of a request.", _FEW)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.rejected = counter("vllm:admission_rejections", "Requests refused because too many were waiting.")
        self._success = Counter(
            "vllm:request_success", "Finished sequences.", (*_LABELS, "finished_reason"), registry=self._registry
        )

    def finished(self, reason: str) -> None:
        """A sequence ended: stop, length, abort or error."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        """The exposition document."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's levels and sums at the time of a scrape."""

    def __init__(self, labels: list[str], engine: Engine) -> None:
        self._labels, self._engine = labels, engine

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Gauges, then counters."""
        now, ready = self._engine.totals.latest, self._engine.ready
        blocks, slots = (ready.blocks, ready.slots) if ready else (0, 0)
        waiting = max(now.waiting, self._engine.open - now.running - now.waiting, 0)
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting for a place.", waiting)
        used = now.blocks_used / blocks if blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache blocks in use, 0 to 1.", used)
        yield self._gauge("dz:blocks_used", "Cache blocks in use.", now.blocks_used)
        yield self._gauge("dz:blocks_total", "Cache blocks there are.", blocks)
        yield self._gauge("dz:slots_used", "State slots in use.", now.slots_used)
        yield self._gauge("dz:slots_total", "State slots there are.", slots)
        yield self._cache_config(ready)
        yield self._sum("vllm:num_preemptions", "Sequences put back to make room.", "preemptions", ())
        yield self._sum("dz:step_tokens", "Tokens processed in steps.", "step_tokens", ())
        yield self._sum("dz:steps", "Steps by kind.", "steps", ("kind",))
        yield self._sum("dz:step_sequences", "Steps by how many sequences they held.", "batch_sizes", ("size",))
        yield self._sum("dz:kernel_calls", "Calls of swapped kernels.", "kernel_calls", ("site", "kernel", "phase"))
        restarts = CounterMetricFamily("dz:engine_restarts", "Times the engine was started again.", labels=_LABELS)
        restarts.add_metric(self._labels, self._engine.restarts)
        yield restarts

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _cache_config(self, ready: Ready | None) -> GaugeMetricFamily:
        names = ("block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's shape.", labels=(*_LABELS, *names))
        if ready is not None:
            family.add_metric([*self._labels, str(ready.block_size), str(ready.blocks)], 1)
        return family

    def _sum(self, name: str, text: str, field: str, labels: tuple[str, ...]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, *labels))
        for key, value in self._engine.totals.counts(field).items():
            parts = str(key).split("|") if len(labels) > 1 else [str(key)] * len(labels)
            family.add_metric([*self._labels, *parts], value)
        return family
