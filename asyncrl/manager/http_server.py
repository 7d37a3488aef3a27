"""The manager's verbs over HTTP, as JSON, with one small handler for all; and its metrics for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.registry import Collector

from asyncrl.comm.http.server import Handler, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.comm.typed import json_decoder
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.logprob_check import LogprobCheck
from asyncrl.manager.messages import BadRequest, NotIntroduced, NotRebuilt, RunBegin, ServerState, Verb
from asyncrl.manager.service import ManagerService

MAX_BODY_BYTES = 16 * 2**20
"""Limit of all other calls. A call for ten thousand requests takes less than two megabytes."""
MAX_RUN_BYTES = 256 * 2**20
"""Limit of the master's report of the run. 100,000 live rollouts and 400,000 ended ones take 40 megabytes."""
Values = float | Mapping[str, float]
"""A metric's value, or its values by label."""


class ManagerHttp(HttpServer):
    """The server.

    Args:
        verbs: by path, the type of the request and its handler.
        security: the token of every verb, and TLS; None if the run has no secret.
        registry: metrics that `/metrics` returns without a token.
    """

    def __init__(
        self, verbs: Mapping[str, Verb], *, security: HttpSecurity | None, registry: CollectorRegistry
    ) -> None:
        async def health(request: web.BaseRequest, body: bytes) -> web.Response:
            return json_response({"status": "ok"})

        async def metrics(request: web.BaseRequest, body: bytes) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        routes = {
            path: HttpRoute(answering(verb), max_bytes=MAX_RUN_BYTES if verb[0] is RunBegin else MAX_BODY_BYTES)
            for path, verb in verbs.items()
        }
        routes |= {"/health": HttpRoute(health, open=True), "/metrics": HttpRoute(metrics, open=True)}
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        super().__init__(routes, token=token, tls=tls, registry=registry)


def answering(verb: Verb) -> Handler:
    """Build the HTTP handler of the verb. A body that is not a valid request is answered with `Refused`."""
    kind, handler = verb
    decoder: msgspec.json.Decoder[Any] = json_decoder(kind)

    async def answer(request: web.BaseRequest, body: bytes) -> web.Response:
        try:
            return json_response(await handler(decoder.decode(body or b"{}")))
        except msgspec.ValidationError as error:
            raise _malformed(_with_path_first(str(error))) from error
        except NotIntroduced as error:
            raise Refused(409, {"error": str(error)}, "not_introduced") from error
        except NotRebuilt as error:
            raise Refused(503, {"error": str(error)}, "not_rebuilt") from error
        except (BadRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(str(error)) from error

    return answer


def _malformed(message: str) -> Refused:
    return Refused(400, {"error": message}, "malformed")


def _with_path_first(message: str) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.order`" into "$.order: expected int, got str"."""
    what, _, path = message.replace("`", "").partition(" - at ")
    return f"{path or '$'}: {what[:1].lower()}{what[1:]}"


class _ManagerCollector(Collector):
    """Reads the metrics from the manager's state on request."""

    def __init__(self, service: ManagerService, decisions: FleetDecisions, logprob_check: LogprobCheck | None) -> None:
        self._service = service
        self._decisions = decisions
        self._logprob_check = logprob_check

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, as of now."""
        for kind, name, documentation, label, values in self._rows():
            metric = kind(f"asyncrl_{name}", documentation, labels=[label] if label else ())
            for labelled, value in values.items() if isinstance(values, Mapping) else [("", values)]:
                metric.add_metric([labelled] if label else (), value)
            yield metric

    def _rows(self) -> Iterator[tuple[type[Counter | Gauge], str, str, str, Values]]:
        """Yield kind, name, documentation and label of each metric (no label: one value), with its values."""
        service, counts, servers = self._service, self._service.gate.counts(), self._service.router.servers
        states = Tally(life.state for life in self._decisions.servers)
        yield Counter, "rollouts_submitted", "Rollouts admitted.", "", counts.submitted
        yield Counter, "rollouts_trained", "Rollouts the optimizer consumed.", "", counts.trained
        yield Counter, "rollouts_dropped", "Rollouts dropped, by reason.", "reason", counts.dropped
        yield Gauge, "rollouts_running", "Rollouts that run.", "", counts.running
        yield Gauge, "rollouts_finished_untrained", "Rollouts that wait to be trained.", "", counts.finished_untrained
        yield Gauge, "gate_limit", "(η + version + 1) · B.", "", service.gate.limit
        yield (
            Counter,
            "generation_idle_seconds",
            "Time in which the full gate let no rollout run.",
            "",
            service.admission.idle_s,
        )
        yield Gauge, "served_version", "Least version that requests are sent to.", "", service.gate.version
        yield Gauge, "trained_version", "Version of the trainer.", "", service.gate.trained_version
        yield Counter, "tokens_finished", "Tokens of accepted rollouts.", "", service.rollouts.tokens_finished
        yield Gauge, "workers_alive", "Workers with a lease.", "", len(service.leases.workers)
        by_state = {state.value: states[state] for state in ServerState}
        yield Gauge, "servers", "Generation servers, by state.", "state", by_state
        sequences = {str(view.index): view.sequences for view in servers}
        yield Gauge, "server_sequences", "Sequences placed.", "server", sequences
        tokens = {str(view.index): view.tokens for view in servers}
        yield Gauge, "server_tokens", "Tokens outstanding at most.", "server", tokens
        if (logprob_check := self._logprob_check) is not None:
            differences = {str(server): difference for server, difference in logprob_check.differences.items()}
            documentation = "Greatest difference to the trainer's log-probabilities at the last check, nats."
            yield Gauge, "logprob_check_difference", documentation, "server", differences
            yield Gauge, "logprob_check_tolerance", "Greatest difference allowed, nats.", "", logprob_check.tolerance
            yield Counter, "logprob_check_alarms", "Checks above the tolerance.", "", logprob_check.alarms


def manager_registry(
    service: ManagerService, decisions: FleetDecisions, logprob_check: LogprobCheck | None = None
) -> CollectorRegistry:
    """Return a separate registry with the manager's metrics."""
    registry = CollectorRegistry()
    registry.register(_ManagerCollector(service, decisions, logprob_check))
    return registry
