"""Prometheus metrics of the GserverManager, read from its state when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.manager.fleet.canary_check import CanaryCheck
from asyncrl.manager.fleet.decisions import FleetDecisions, ServerState
from asyncrl.manager.service import ManagerService


class _ManagerCollector(Collector):
    def __init__(self, service: ManagerService, decisions: FleetDecisions, canary: CanaryCheck | None) -> None:
        self._service = service
        self._decisions = decisions
        self._canary = canary

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        yield from self._gate()
        yield from self._servers()
        if self._canary is not None:
            yield from self._checks(self._canary)

    def _gate(self) -> Iterator[Metric]:
        service, books = self._service, self._service.gate.books()
        yield CounterMetricFamily("asyncrl_rollouts_submitted", "Rollouts admitted.", books.submitted)
        yield CounterMetricFamily("asyncrl_rollouts_trained", "Rollouts the optimizer consumed.", books.trained)
        dropped = CounterMetricFamily("asyncrl_rollouts_dropped", "Rollouts dropped, by reason.", labels=["reason"])
        for reason, count in books.dropped.items():
            dropped.add_metric([reason], count)
        yield dropped
        yield GaugeMetricFamily("asyncrl_rollouts_running", "Rollouts under way.", books.running)
        yield GaugeMetricFamily(
            "asyncrl_rollouts_finished_untrained", "Rollouts that wait to be trained.", books.finished_untrained
        )
        yield GaugeMetricFamily("asyncrl_gate_limit", "(η + version + 1) · B.", service.gate.limit)
        yield CounterMetricFamily(
            "asyncrl_gate_closed_seconds", "Time in which no rollout could start.", service.gate_closed_s
        )
        yield GaugeMetricFamily("asyncrl_served_version", "Least version that requests are sent to.", books.version)
        yield GaugeMetricFamily("asyncrl_trained_version", "Version of the trainer.", books.trained_version)
        yield CounterMetricFamily("asyncrl_tokens_finished", "Tokens of accepted rollouts.", service.tokens_finished)
        yield GaugeMetricFamily("asyncrl_workers_alive", "Workers with a lease.", len(service.leases.workers))

    def _servers(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("asyncrl_servers", "Generation servers, by state.", labels=["state"])
        lives = self._decisions.servers
        for state in ServerState:
            states.add_metric([state.value], sum(life.state is state for life in lives))
        yield states
        sequences = GaugeMetricFamily("asyncrl_server_sequences", "Sequences placed.", labels=["server"])
        tokens = GaugeMetricFamily("asyncrl_server_tokens", "Tokens outstanding at most.", labels=["server"])
        for view in self._service.router.servers:
            sequences.add_metric([str(view.index)], view.sequences)
            tokens.add_metric([str(view.index)], view.tokens)
        yield sequences
        yield tokens

    def _checks(self, canary: CanaryCheck) -> Iterator[Metric]:
        differences = GaugeMetricFamily(
            "asyncrl_canary_difference",
            "Greatest difference to the trainer's log-probabilities at the last check, nats.",
            labels=["server"],
        )
        for server, difference in canary.differences.items():
            differences.add_metric([str(server)], difference)
        yield differences
        yield GaugeMetricFamily("asyncrl_canary_tolerance", "Greatest difference allowed, nats.", canary.tolerance)
        yield CounterMetricFamily("asyncrl_canary_alarms", "Checks above the tolerance.", canary.alarms)


def manager_registry(
    service: ManagerService, decisions: FleetDecisions, canary: CanaryCheck | None = None
) -> CollectorRegistry:
    """A registry of its own with the manager's metrics."""
    registry = CollectorRegistry()
    registry.register(_ManagerCollector(service, decisions, canary))
    return registry
