"""Figures of an engine for `observed/`, from its Prometheus metrics under SGLang's names."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Never

from prometheus_client.parser import text_string_to_metric_families

from asyncrl.comm.http.calls import HttpError
from asyncrl.inference.client import GenerationServerClient
from asyncrl.observe.observer import EVERY_S

TIMEOUT_S = 5.0
_SUMS = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queued",
    "num_paused_reqs": "paused",
    "gen_throughput": "tokens_per_s",
    "generation_tokens_total": "generated_total",
    "prompt_tokens_total": "prompt_total",
    "cached_tokens_total": "cached_total",
    "prefilled_tokens_total": "prefilled_total",
    "kept_tokens": "kept_tokens",
    "num_retracted_reqs_total": "retracted_total",
    "num_retracted_requests_total": "retracted_total",
    "num_aborted_requests_total": "aborted_total",
    "num_aborted_reqs_total": "aborted_total",
    "busy_seconds_total": "busy_s",
}
"""Name of each figure in `observed/`, by SGLang's name. Values of several schedulers are added."""
_LARGEST = {"token_usage": "kv_share"}
"""Shares; the largest of several schedulers is taken."""


def engine_figures(text: str) -> dict[str, float]:
    """Return the figures in `text`, in Prometheus' format, without those that the engine does not have."""
    figures: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if (ours := _SUMS.get(name)) is not None:
                figures[ours] += sample.value
            elif (ours := _LARGEST.get(name)) is not None:
                figures[ours] = max(figures[ours], sample.value)
    return dict(figures)


class EngineFigures:
    """The newest figures of one engine; `follow` keeps them up to date."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}

    def __call__(self) -> dict[str, float]:
        """Return the newest figures; none while the engine does not answer."""
        return self.newest

    async def follow(self, client: GenerationServerClient) -> Never:
        """Ask the engine at intervals until cancelled."""
        limits: dict[str, float] = {}
        try:
            while True:
                try:
                    limits = limits or await client.limits(timeout_s=TIMEOUT_S)
                    self.newest = limits | engine_figures(await client.metrics(timeout_s=TIMEOUT_S))
                except (HttpError, ValueError):
                    self.newest = {"silent": 1.0}
                await asyncio.sleep(EVERY_S)
        finally:
            self.newest = {}
