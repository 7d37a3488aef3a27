"""Prometheus metrics of the engine under SGLang's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.serving.pictures import PictureCache

LATENCY_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class EngineCollector(Collector):
    """Reads the engine's snapshot when scraped."""

    def __init__(self, engine: GenerationEngine, model_name: str, pictures: PictureCache | None = None) -> None:
        self._engine, self._model_name, self._pictures = engine, model_name, pictures

    def collect(self) -> Iterator[Metric]:
        """Return the metric families of one scrape."""
        stats, kept = self._engine.stats(), self._pictures
        cached_share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        gauges = (
            ("num_running_reqs", "Samples being decoded", stats.running),
            ("num_queue_reqs", "Samples waiting", stats.waiting),
            ("num_paused_reqs", "Samples frozen by a pause", stats.running if stats.paused else 0),
            ("num_used_tokens", "Positions of the KV cache in use", stats.used_tokens),
            ("token_usage", "Share of the KV cache in use", stats.used_tokens / stats.max_total_tokens),
            ("kept_tokens", "Positions of the KV cache that are kept for later requests", stats.kept_tokens),
            ("cache_hit_rate", "Share of prompt tokens copied instead of prefilled", cached_share),
            ("gen_throughput", "Generated tokens per second", stats.gen_throughput),
            *(() if kept is None else (("kept_picture_bytes", "Bytes of pictures that are kept", kept.nbytes),)),
        )
        counters = (
            ("prompt_tokens", "Prompt tokens", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens copied instead of prefilled", stats.cached_tokens),
            ("prefilled_tokens", "Distinct tokens of prompts that were computed", stats.prefilled_tokens),
            ("generation_tokens", "Generated tokens", stats.generated_tokens),
            ("num_requests", "Finished samples", stats.finished_requests),
            ("num_aborted_requests", "Aborted samples", stats.aborted_requests),
            ("num_retracted_reqs", "Samples sent back to the queue", stats.retractions),
            ("encoded_pictures", "Pictures that the vision tower has computed", stats.encoded_pictures),
            *(() if kept is None else (("received_pictures", "Pictures whose bytes were received", kept.received),)),
            ("busy_seconds", "Seconds spent in engine steps", stats.busy_seconds),
        )
        for family_type, readings in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, meaning, value in readings:
                family = family_type(f"sglang:{name}", meaning, labels=["model_name"])
                family.add_metric([self._model_name], value)
                yield family


def build_registry(
    engine: GenerationEngine, model_name: str, pictures: PictureCache | None
) -> tuple[CollectorRegistry, Histogram]:
    """Return a registry for one server, and its histogram of latencies of whole requests."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name, pictures))
    latency = Histogram(
        "sglang:e2e_request_latency_seconds",
        "Seconds from a call's arrival to its reply",
        buckets=LATENCY_BUCKETS_S,
        registry=registry,
    )
    return registry, latency
