"""GserverManager: staleness gate, router and weight updates of the run, as one process. No tokens pass through it.

    service              the methods, over the pure state of gate, prompts, router and workers, and HTTP around them
    fleet/policy_fleets  the generation servers, by policy
    fleet/decisions      next action of each of them on the way to the newest weights
    fleet/fleet_runner   carries it out, and updates the router and the gate

This module watches name resolution for generation servers, RolloutWorkers and published weights, and has the metrics.
"""

from __future__ import annotations

import asyncio
import logging
import pkgutil
from collections import Counter as Tally
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.registry import Collector

from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.name_resolve import NameResolver, NameResolveTimeout, Subtree
from asyncrl.comm.waits import LOOK_S, RunningClock
from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.data.datasets import DataRecord
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import LogprobCheck
from asyncrl.manager.fleet.policy_fleets import PolicyFleets
from asyncrl.manager.fleet.servers import Target
from asyncrl.manager.messages import RequestSize, ServerState, StatusReply, StatusRequest, WaitAsleepRequest
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.observe import observer
from asyncrl.rollout.settings import Pacing
from asyncrl.runtime.plan import COLOCATED_SERVERS, DEADLINE_PACING, MANAGER_PART, PROCESS_KINDS
from asyncrl.runtime.process.hardware import allow_connections
from asyncrl.runtime.process.worker import AsyncWorker, WorkerSpec
from asyncrl.runtime.run_log import notice
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.parallel.placement import worker_grid
from asyncrl.weights.manifest import Manifest, ManifestError, verify
from asyncrl.weights.transports.base import weight_transport

if TYPE_CHECKING:
    from asyncrl.data.curriculum import Curriculum

Values = float | Mapping[str, float]
"""A metric's value, or its values by label."""
_WORKER_GONE = "%s is gone or silent: its rollouts are dropped, and their prompts wait for any worker"


class GserverManager(AsyncWorker):
    """Process of the staleness gate, the router and the weight updates."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        config = self.config
        self._clock = RunningClock()
        make_curriculum: Callable[[object], Curriculum] | None = None
        if config.dataset.curriculum.is_on:
            from asyncrl.data import curriculum

            make_curriculum = partial(curriculum.make_curriculum, config.dataset.curriculum)
        self._ledger = None if config.samples.only else Ledger.of_run(self.run_dir, config)
        """How every rollout ended; a run that only keeps samples trains none."""
        bound = (config.train_batch_size, config.max_head_offpolicyness)
        likely = (config.dataset.max_prompt_tokens, config.rollout.sampling.max_new_tokens, config.group_size)
        first = RequestSize(*likely)  # most agents ask for the whole group
        self._service = ManagerService(
            batch_size=bound[0],
            max_staleness=bound[1],
            routing=config.manager.routing,
            lease_s=config.system.silence_s,
            order=self._order(),
            number=spec.incarnation,
            first=None if config.manager.update_mode == UpdateMode.finish or config.is_online else first,
            pacing=pkgutil.resolve_name(DEADLINE_PACING)(*bound) if config.rollout.pacing == Pacing.deadline else None,
            clock=self._clock,
            versions_in_use=lambda: self._fleets.versions_in_use(),
            policies=[policy.name for policy in config.policies],
            trained=config.trained_policies,
            online=config.is_online,
            launch=self.launch,
            curriculum=make_curriculum,
            ledger=self._ledger,
        )
        self._first_manifest: Manifest | None = None
        self._workers = RolloutWorkers(self.resolver, self._service, config.rollout.workers, self.log)

    async def main(self) -> None:
        """Serve until a stop is requested."""
        workers, servers, others = (
            PROCESS_KINDS[kind].count(self.config)
            for kind in (names.ROLLOUT_WORKER, names.GENERATION_SERVER, names.POLICY_SERVER)
        )
        servers += others
        allow_connections(workers + servers, f"{workers} RolloutWorkers and {servers} generation servers")
        servers_http = JsonHttp(self.http_security)
        publisher = PublisherClient(self.resolver, self.security, worker_grid(self.config).publisher)
        self._fleets = PolicyFleets(
            self.config,
            self._service,
            servers_http,
            weight_transport(self.config.manager.weight_transport).manager_end(publisher),
            resolver=self.resolver,
            log=self.log,
            clock=self._clock,
            tell=partial(notice, self.run_dir),
        )
        own = self._fleets.own
        registry = manager_registry(self._service, own.decisions, self._fleets.logprob_check)
        methods = self._service.methods() | {StatusRequest.path: (StatusRequest, self._answer_status)}
        colocated = None
        if own.decisions.colocated:
            make = pkgutil.resolve_name(COLOCATED_SERVERS)
            colocated = make(self.resolver, own.decisions, own, self._clock)
            methods[WaitAsleepRequest.path] = (WaitAsleepRequest, colocated.wait_asleep)
        http = ManagerHttp(methods, security=self.http_security, registry=registry)
        try:
            url = await http.start(self.config.system.host)
            self.resolver.add(names.MANAGER_KEY, url, lease_s=self.config.system.lease_s, replace=True)
            self.ready()
            observer.gauges(self._figures)
            async with asyncio.TaskGroup() as loops:
                works = [
                    self._clock.keep(),
                    self._fleets.run(),
                    self._watch_versions(),
                    self._watch_registrations(),
                    self._write_ledger(),
                ]
                if colocated is not None:
                    await colocated.resume()
                    works.append(colocated.run())
                if not self.config.system.shared_filesystem:
                    bring: Callable[..., Coroutine[Any, Any, None]] = pkgutil.resolve_name(MANAGER_PART)
                    works.append(bring(self, servers_http, own.decisions, own, self._clock))
                tasks = [loops.create_task(work) for work in works]
                await self.stop.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await http.close()
            await servers_http.close()
            publisher.close()
            if self._ledger is not None:
                self._ledger.close()

    def _figures(self) -> dict[str, float]:
        """Return figures for `observed/`; another thread calls it."""
        service, gate = self._service, self._service.gate
        counts, records = gate.counts(), list(self._fleets.own.decisions.servers)
        return {
            "rollouts_running": counts.running,
            "finished_untrained": counts.finished_untrained,
            "submitted_total": counts.submitted,
            "trained_total": counts.trained,
            "dropped_total": sum(counts.dropped.values()),
            "gate_limit": gate.limit,
            "idle_s": round(service.admission.idle_s, 3),
            "served_version": gate.version,
            "trained_version": gate.trained_version,
            "workers": len(service.workers.alive),
            **{f"servers_{state.value}": sum(record.state is state for record in records) for state in ServerState},
        }

    def status(self) -> StatusReply:
        """Return gate, servers, newest published version and living workers."""
        service, target = self._service, self._fleets.own.decisions.targets.newest
        newest = None if target is None else target.version
        return StatusReply(service.gate_state(), self._fleets.status(), newest, service.workers.alive, service.begun)

    async def _answer_status(self, request: StatusRequest) -> StatusReply:
        return self.status()

    def _order(self) -> DataOrder:
        """Return the data order; a launch that only evaluates has no training data, and 1 row."""
        config, file = self.config, self.run_dir / DATA_RECORD_FILE
        if config.samples.replay:  # kept rollouts take the place of rows, in the order in which they were trained
            return DataOrder(config.total_train_steps * config.train_batch_size, config.seed, shuffle=False, epochs=1)
        rows = DataRecord.read(file).rows if file.is_file() else 1
        return DataOrder(rows, config.seed, shuffle=config.dataset.shuffle, epochs=config.total_epochs)

    async def _watch_versions(self) -> None:
        """Pass each published version to the servers, once it has been checked."""
        last: str | None = None
        while True:
            try:
                last = await asyncio.to_thread(self.resolver.watch, names.model_version_key(names.ACTOR), LOOK_S, last)
            except NameResolveTimeout:
                continue
            if last is not None:
                published = names.PublishedVersion.decode(last)
                await self._take(Target(published.version, published.path), published.win_rates)

    async def _take(self, target: Target, win_rates: names.WinRatesOfPools) -> None:
        """Make `target` the version that generation servers update to.

        A damaged or mismatching version is refused, and servers keep the present one. Checksums are verified here if
        the engine does not verify them itself when it reads the files.
        """
        summed = not self.config.generation.engine.verifies_files
        try:
            manifest = await asyncio.to_thread(verify, Path(target.path), checksums=summed)
            if self._first_manifest is not None:
                self._first_manifest.check_same_tensors(manifest)
            if manifest.version != target.version:
                raise ManifestError(f"{target.path} holds v{manifest.version}, published as v{target.version}")
            await asyncio.to_thread(self._fleets.check, target)
        except ManifestError as error:
            self.log.error("weights v%d are refused, servers keep their present version: %s", target.version, error)
        else:
            self._first_manifest = self._first_manifest or manifest
            await self._fleets.published(target, win_rates)
            if self.config.samples.replay:  # no server says that it serves the version
                self._service.routes_changed(target.version)
        # Colocated servers that wake need not wait for this version, even if it was refused.
        colocated = self._fleets.own.decisions.colocated
        colocated.announced = max(colocated.announced, target.version)
        self._fleets.own.changed.notify()

    async def _watch_registrations(self) -> None:
        """Follow the registered generation servers, and RolloutWorkers."""
        followed = [
            (
                kind,
                await asyncio.to_thread(self.resolver.follow, servers),
                await asyncio.to_thread(self.resolver.follow, f"{names.STATUSES}/{kind}"),
            )
            for kind, servers in (
                (names.GENERATION_SERVER, names.GENERATION_SERVERS),
                (names.POLICY_SERVER, names.POLICY_SERVERS),
            )
        ]
        await self._workers.follow()
        while True:
            for kind, servers, statuses in followed:
                self._fleets.registered(kind, _servers(servers))
                self._fleets.reported(kind, {names.index_of(key): value for key, value in statuses.entries().items()})
            await self._workers.look()
            await asyncio.sleep(LOOK_S)

    async def _write_ledger(self) -> None:
        """Hand the ledger's lines to the kernel several times a second, so that others may read them."""
        while self._ledger is not None:
            if self._service.begun:  # before that, a thread may write the lineage's first line
                await self._ledger.written()
            await asyncio.sleep(LOOK_S)


def _servers(registered: Subtree) -> dict[int, tuple[str, int]]:
    """Return generation servers by index, with URL and version."""
    entries = {key: names.GenerationServerEntry.decode(value) for key, value in registered.entries().items()}
    return {names.index_of(key): (entry.url, entry.version) for key, entry in entries.items()}


class RolloutWorkers:
    """Reports to the service the RolloutWorkers that are ready, replaced, silent or gone.

    Args:
        of_launch: number of workers that the launcher starts, and starts again. Others have joined.

    Attributes:
        present: workers found at the last `look`.
    """

    def __init__(self, resolver: NameResolver, service: ManagerService, of_launch: int, log: logging.Logger) -> None:
        self._resolver, self._service, self._of_launch, self._log = resolver, service, of_launch, log
        self.present: set[str] = set()
        self._statuses: Subtree
        self._replaced: Subtree

    async def follow(self) -> None:
        """Begin to follow workers, and their processes that the launcher replaces."""
        follow = self._resolver.follow
        self._statuses = await asyncio.to_thread(follow, f"{names.STATUSES}/{names.ROLLOUT_WORKER}")
        self._replaced = await asyncio.to_thread(follow, f"{names.INCARNATIONS}/{names.ROLLOUT_WORKER}")

    async def look(self) -> None:
        """Report the present entries of name resolution, and drop the rollouts of workers that are silent, gone, or
        another incarnation than before.
        """
        statuses = {_worker(key): names.WorkerStatus.decode(value) for key, value in self._statuses.entries().items()}
        replaced = {_worker(key): int(number) for key, number in self._replaced.entries().items()}
        if not self._service.begun:  # of those that are ready, except processes that have died since
            ready = {name: each.incarnation for name, each in statuses.items() if each.state == "ready"}
            alive = {name: number for name, number in ready.items() if number >= replaced.get(name, 0)}
            self._service.await_workers(alive)
        await self._drop_rollouts_of_replaced(replaced)
        present = {
            name: each.incarnation
            for name, each in statuses.items()  # joined workers, which have no successors, only if they have not left
            if each.state in ("starting", "ready") or names.index_of(name) < self._of_launch
        }
        new = [worker for worker, number in present.items() if self._service.incarnation_seen(worker, number)]
        gone = self.present - present.keys()
        self.present = set(present)
        for worker in gone:
            self._service.worker_died(worker)
        for worker in [*gone, *new, *self._service.expire_workers()]:
            self._log.warning(_WORKER_GONE, worker)

    async def _drop_rollouts_of_replaced(self, replaced: dict[str, int]) -> None:
        """Drop the rollouts of workers whose death the launcher reports, and record the kind of death.

        This comes first, because a death makes running prompts suspects. If the dead worker's name expired first, it
        would count as silent, which need not be a death.
        """
        of = self._service.workers.of
        new = {worker: number for worker, number in replaced.items() if number > of(worker).incarnation}
        if new:
            tree = await asyncio.to_thread(self._resolver.get_subtree, f"{names.KILLED}/{names.ROLLOUT_WORKER}")
            killed = {_worker(key): int(number) for key, number in tree.items()}
            for worker, number in new.items():
                if self._service.incarnation_seen(worker, number, killed=killed.get(worker) == number):
                    self._log.warning(_WORKER_GONE, worker)


def _worker(key: str) -> str:
    """Return the name of the RolloutWorker that an entry of name resolution is about."""
    return f"{names.ROLLOUT_WORKER}/{names.index_of(key)}"


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
        states = Tally(record.state for record in self._decisions.servers)
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
        yield Gauge, "workers_alive", "Workers with a lease.", "", len(service.workers.alive)
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
