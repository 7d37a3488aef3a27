"""GserverManager: staleness gate, router and weight updates of the run, as one process. No tokens pass through it.

    service                   the verbs, over the pure state of gate, prompts, router and leases
    http_server               HTTP around them, with the types in `messages`
    rollouts/rollout_workers  RolloutWorkers that died: their rollouts are dropped
    fleet/decisions           next action of each generation server on the way to the newest weights
    fleet/fleet_runner        carries it out, and updates the router
    fleet/staging             brings versions to hosts that share no folder
    fleet/guests              turns on devices that servers share with the trainer

This module watches name resolution for generation servers and published weights.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.name_resolve import NameResolveTimeout, Subtree
from asyncrl.comm.waits.limits import LOOK_S
from asyncrl.comm.waits.running_time import RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.inference.settings import guests_of
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.guests.guests import Guests
from asyncrl.manager.fleet.guests.turns import GuestTurns
from asyncrl.manager.fleet.logprob_check import LogprobCheck, logprob_check_tolerance
from asyncrl.manager.fleet.policy_fleets import PolicyFleets
from asyncrl.manager.fleet.servers import Target
from asyncrl.manager.fleet.servers_in_use import ServersInUse
from asyncrl.manager.fleet.staging import Staging, staging_of
from asyncrl.manager.fleet.targets import ServerTargets
from asyncrl.manager.fleet.update import ServerUpdater
from asyncrl.manager.http_server import ManagerHttp, manager_registry
from asyncrl.manager.messages import Empty, RequestSize, ServerState, StatusReply, WaitRestingRequest
from asyncrl.manager.rollouts.ledger import Ledger
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.rollouts.rollout_workers import RolloutWorkers
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.weights.transports.base import weight_transport
from asyncrl.models.weights.versions.manifest import Manifest, ManifestError, verify
from asyncrl.observe import observer
from asyncrl.plugins.datasets.queue.curriculum import make_curriculum
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord
from asyncrl.rollout.settings import Pacing
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS
from asyncrl.runtime.process.descriptors import allow_connections
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.process.worker import AsyncWorker, WorkerSpec
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.parallel.placement import worker_grid


class GserverManager(AsyncWorker):
    """Process of the staleness gate, the router and the weight updates."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        config = self.config
        self._clock = RunningClock()
        updates = config.manager
        self._decisions = FleetDecisions(
            updates.update_mode,
            updates.update_timeout_s,
            updates.update_fraction,
            targets=ServerTargets(staged=not config.system.shared_filesystem, initial=str(config.model.path)),
            guests=GuestTurns(guests_of(config.generation)),
        )
        curriculum = config.dataset.curriculum
        self._ledger = None if config.samples.only else Ledger.of_run(self.run_dir, config)
        """How every rollout ended; a run that only keeps samples trains none."""
        bound = (config.train_batch_size, config.max_head_offpolicyness)
        self._service = ManagerService(
            batch_size=bound[0],
            max_staleness=bound[1],
            routing=config.manager.routing,
            lease_s=config.system.silence_s,
            order=self._order(),
            number=spec.incarnation,
            first=_first_request(config) if updates.update_mode != UpdateMode.finish else None,
            pacing=DeadlinePacing(*bound) if config.rollout.pacing == Pacing.deadline else None,
            clock=self._clock,
            versions_in_use=self._versions_in_use,
            policies=[policy.name for policy in config.policies],
            trained=config.trained_policies,
            launch=self.launch,
            curriculum=partial(make_curriculum, curriculum) if curriculum.is_on else None,
            ledger=self._ledger,
        )
        tolerance = logprob_check_tolerance(config)
        self._logprob_check = LogprobCheck(tolerance, self.log) if tolerance else None
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
        self._fleet_runner = self._make_fleet_runner(servers_http, publisher)
        self._guests = Guests(self.resolver, self._decisions, self._fleet_runner, self._clock)
        known = (self.config, self._decisions, self._service)
        self._policies = PolicyFleets(*known, servers_http, self.log, self._clock, partial(remark, self.run_dir))
        self._staging = (
            None
            if self.config.system.shared_filesystem
            else staging_of(
                self.config,
                self.run_dir,
                servers_http,
                self._decisions,
                self._fleet_runner.arrived,
                log=self.log,
                clock=self._clock,
            )
        )
        registry = manager_registry(self._service, self._decisions, self._logprob_check)
        verbs = self._service.verbs() | {
            "/status": (Empty, self._answer_status),
            "/wait_resting": (WaitRestingRequest, self._guests.wait_resting),
        }
        http = ManagerHttp(verbs, security=self.http_security, registry=registry)
        try:
            url = await http.start(self.config.system.host)
            self.resolver.add(names.MANAGER_KEY, url, lease_s=self.config.system.lease_s, replace=True)
            self.ready()
            observer.gauges(self._figures)
            async with asyncio.TaskGroup() as loops:
                works = [
                    self._clock.keep(),
                    self._fleet_runner.run(),
                    self._watch_versions(),
                    self._watch_registrations(),
                    self._policies.run(),
                    self._say_begun(),
                    self._write_ledger(),
                ]
                if self._decisions.guests:
                    await self._guests.take_up()
                    works.append(self._guests.run())
                if self._staging is not None:
                    works += [self._staging.run(), self._watch_hosts(self._staging)]
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

    def _make_fleet_runner(self, http: JsonHttp, publisher: PublisherClient) -> FleetRunner:
        updates = self.config.manager
        updater = ServerUpdater(
            http,
            weight_transport(updates.weight_transport).manager_end(publisher),
            timeout_s=updates.update_timeout_s,
            checks=() if self._logprob_check is None else (self._logprob_check,),
            own_api=self.config.generation.engine.own_api,
        )
        return FleetRunner(
            self._decisions,
            ServersInUse(self._decisions, self._service, served_version=lambda: self._policies.served_version()),
            updater,
            http,
            health_interval_s=updates.health_interval_s,
            log=self.log,
            clock=self._clock,
            tell=partial(remark, self.run_dir),
        )

    def _versions_in_use(self) -> set[int]:
        return self._decisions.versions_in_use() | self._policies.versions_in_use()

    def _figures(self) -> dict[str, float]:
        """Return figures for `observed/`; another thread calls it."""
        service, gate = self._service, self._service.gate
        counts, lives = gate.counts(), list(self._decisions.servers)
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
            "workers": len(service.leases.workers),
            **{f"servers_{state.value}": sum(life.state is state for life in lives) for state in ServerState},
        }

    def status(self) -> StatusReply:
        """Return gate, servers, newest published version and living workers."""
        service, target = self._service, self._decisions.targets.newest
        newest = None if target is None else target.version
        servers, workers = self._fleet_runner.in_use.status(), service.leases.workers
        return StatusReply(service.gate_state(), servers, newest, workers, service.begun, self._policies.status())

    async def _answer_status(self, request: Empty) -> StatusReply:
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
            last = await self._next_value(names.model_version_key(names.ACTOR), last)
            if last is not None:
                published = names.PublishedVersion.decode(last)
                await self._take(Target(published.version, published.path), published.win_rates)

    async def _next_value(self, key: str, last: str | None) -> str | None:
        """Wait until the value of `key` in name resolution differs from `last`, and return it."""
        while True:
            try:
                return await asyncio.to_thread(self.resolver.watch, key, LOOK_S, last)
            except NameResolveTimeout:
                continue

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
            await asyncio.to_thread(self._policies.check, target)
        except ManifestError as error:
            self.log.error("weights v%d are refused, servers keep their present version: %s", target.version, error)
            self._announced(target)
            return
        self._first_manifest = self._first_manifest or manifest
        self._fleet_runner.publish(target)
        self._announced(target)
        if self._staging is not None:
            self._staging.publish(target)
        await self._policies.published(target, win_rates)
        if self.config.samples.replay:  # no server says that it serves the version
            self._service.routes_changed(target.version)

    def _announced(self, target: Target) -> None:
        """Record that guests that wake need not wait for this version, even if it was refused."""
        guests = self._decisions.guests
        guests.announced = max(guests.announced, target.version)
        self._fleet_runner.changed.notify()

    async def _watch_hosts(self, staging: Staging) -> None:
        """Follow the registered staging servers."""
        registered = await asyncio.to_thread(self.resolver.follow, names.STAGING_SERVERS)
        while True:
            staging.registered({names.index_of(key): url for key, url in registered.entries().items()})
            await asyncio.sleep(LOOK_S)

    async def _watch_registrations(self) -> None:
        """Follow the registered generation servers, and RolloutWorkers."""
        registered = await asyncio.to_thread(self.resolver.follow, names.GENERATION_SERVERS)
        others = await asyncio.to_thread(self.resolver.follow, names.POLICY_SERVERS)
        kinds = (names.GENERATION_SERVER, names.POLICY_SERVER)
        own, of_others = [await asyncio.to_thread(self.resolver.follow, f"{names.STATUSES}/{kind}") for kind in kinds]
        await self._workers.follow()
        while True:
            self._fleet_runner.registered(_servers(registered))
            self._policies.registered(_servers(others))
            self._fleet_runner.reported({names.index_of(key): value for key, value in own.entries().items()})
            self._policies.reported({names.index_of(key): value for key, value in of_others.entries().items()})
            await self._workers.look()
            await asyncio.sleep(LOOK_S)

    async def _say_begun(self) -> None:
        while not self._service.begun:
            await self._service.progress.wait(LOOK_S)
        self.log.info("the gate is open: %s", self._service.gate.counts())

    async def _write_ledger(self) -> None:
        """Hand the ledger's lines to the kernel several times a second, so that others may read them."""
        while self._ledger is not None:
            if self._service.begun:  # before that, a thread may write the lineage's first line
                await self._ledger.written()
            await asyncio.sleep(LOOK_S)


def _first_request(config: ExperimentConfig) -> RequestSize:
    """Return the likely size of a rollout's first request: most agents ask for the whole group."""
    return RequestSize(config.dataset.max_prompt_tokens, config.rollout.sampling.max_new_tokens, config.group_size)


def _servers(registered: Subtree) -> dict[int, tuple[str, int]]:
    """Return generation servers by index, with URL and version."""
    entries = {key: names.GenerationServerEntry.decode(value) for key, value in registered.entries().items()}
    return {names.index_of(key): (entry.url, entry.version) for key, entry in entries.items()}
