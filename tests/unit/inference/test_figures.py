"""Figures of engines, from what they show Prometheus."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry

from asyncrl.inference.embedded.jobs import EngineStats
from asyncrl.inference.embedded.server import EngineCollector
from asyncrl.inference.messages import engine_figures

SGLANG = """
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m"} 4.0
# TYPE sglang:token_usage gauge
sglang:token_usage{dp_rank="0",model_name="m"} 0.25
sglang:token_usage{dp_rank="1",model_name="m"} 0.5
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 2.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 1000.0
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{le="0.1",model_name="m"} 5.0
"""


class Engine:
    def stats(self) -> EngineStats:
        return EngineStats(
            running=5, waiting=2, used_tokens=30, max_total_tokens=120, generated_tokens=70, retractions=1,
            prompt_tokens=40, cached_tokens=10, prefilled_tokens=25, kept_tokens=60,
            busy_seconds=1.5, gen_throughput=9.0,
        )  # fmt: skip


def test_figures_of_several_schedulers_are_summed_and_shares_are_the_largest() -> None:
    assert engine_figures(SGLANG) == {"running": 7, "kv_share": 0.5, "retracted_total": 2, "generated_total": 1000}


def test_the_embedded_engine_shows_all_figures() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(Engine(), "m"))  # type: ignore[arg-type]
    assert engine_figures(generate_latest(registry).decode()) == {
        "running": 5,
        "queued": 2,
        "paused": 0,
        "kv_share": 0.25,
        "tokens_per_s": 9,
        "prompt_total": 40,
        "cached_total": 10,
        "prefilled_total": 25,
        "kept_tokens": 60,
        "generated_total": 70,
        "aborted_total": 0,
        "retracted_total": 1,
        "busy_s": 1.5,
    }
