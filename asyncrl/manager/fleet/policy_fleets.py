"""The generation servers, by policy: the run's own, and those of `policies`, which are further trained policies, fixed
models, and older versions of the run's own policy.

Each policy has its own servers, router and `FleetDecisions`, so that all servers are updated, quarantined and routed to
in the same way. The servers of a trained policy follow its versions. The staleness gate counts by the least version
among the servers of all trained policies, the run's own among them. The other servers do not affect the gate.

Whenever a version is published, each server of a pool is assigned a member (`VersionPoolConfig.choose`). The server is
drained first, so every answer comes from one version. Before the first version joins the pool, its servers have the
initial model.

The members' folders stay on disk. The MasterWorker keeps the versions that the same rule needs, and those that servers
read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.names import GENERATION_SERVER, POLICY_SERVER, WinRatesOfPools
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import colocated_servers
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner, LogprobCheck, ServerUpdater, logprob_check_tolerance
from asyncrl.manager.fleet.servers import ColocatedTurns, ServerTargets, Target
from asyncrl.manager.messages import ServerStatus
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import PolicyConfig, UpdateMode
from asyncrl.weights.manifest import ManifestError, verify
from asyncrl.weights.transports.base import ManagerEnd


class _PolicyLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the policy's name to each line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"policy {(self.extra or {})['policy']}: {msg}", kwargs


class PolicyFleets:
    """A fleet for each policy.

    Args:
        config: has the policies, and the seed that decides which server gets which version.
        transport: brings the versions of the run's own policy to its servers.
        tell: see `FleetRunner`.

    Attributes:
        own: the fleet of the run's own policy.
        logprob_check: checks each update of it; None if that is turned off.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        service: ManagerService,
        http: JsonHttp,
        transport: ManagerEnd,
        *,
        resolver: NameResolver | None = None,
        log: logging.Logger,
        clock: Callable[[], float],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._service, self._http, self._transport = config, service, http, transport
        self._resolver, self._log, self._clock, self._tell = resolver, log, clock, tell
        updates = config.manager
        as_trained = (updates.update_mode, updates.update_timeout_s, updates.update_fraction)
        targets = ServerTargets(staged=not config.system.shared_filesystem, initial=str(config.model.path))
        decisions = FleetDecisions(
            *as_trained, targets=targets, colocated=ColocatedTurns(colocated_servers(config.generation))
        )
        tolerance = logprob_check_tolerance(config)
        self.logprob_check = LogprobCheck(tolerance, log) if tolerance else None
        self.own = self._fleet(None, decisions, transport, self.logprob_check)
        self._fleets = {"": self.own}
        for policy in config.policies:
            as_fixed = (UpdateMode.finish, updates.update_timeout_s)
            decisions = FleetDecisions(*as_trained) if policy.trained else FleetDecisions(*as_fixed)
            check = LogprobCheck(tolerance, log) if tolerance else None
            self._fleets[policy.name] = self._fleet(policy, decisions, ManagerEnd(), check)

    def _fleet(
        self, policy: PolicyConfig | None, decisions: FleetDecisions, transport: ManagerEnd, check: LogprobCheck | None
    ) -> FleetRunner:
        """Return the fleet of `policy`; None: of the run's own."""
        config, updates, name = self._config, self._config.manager, "" if policy is None else policy.name
        indices = [index for index, each in enumerate(config.policy_of_server) if each.name == name]
        foreign, engine = policy is not None and policy.url is not None, config.generation.engine
        return FleetRunner(
            decisions,
            self._service,
            ServerUpdater(
                self._http,
                transport,
                timeout_s=updates.update_timeout_s,
                check=check,
                keeps_pictures=not foreign and engine.keeps_pictures,
                pause_ends_requests=not foreign and engine.pause_ends_requests,
            ),
            self._http,
            health_interval_s=updates.health_interval_s,
            kind=GENERATION_SERVER if policy is None else POLICY_SERVER,
            indices=None if policy is None else indices,
            policy=name,
            served_version=self.served_version if policy is None or policy.trained else None,
            frozen=foreign,
            resolver=self._resolver,
            log=self._log if policy is None else _PolicyLog(self._log, {"policy": name}),
            clock=self._clock,
            tell=self._tell,
        )

    def served_version(self) -> int | None:
        """Return the least version that servers of a trained policy have; None while one of these policies has no
        server.
        """
        fleets = [self._fleets[name].decisions for name in ("", *self._config.trained_policies)]
        served = [version for fleet in fleets if (version := fleet.served_version) is not None]
        return min(served) if len(served) == len(fleets) else None

    def versions_in_use(self) -> set[int]:
        """Versions that servers of trained policies and of pools serve or load; their weights may still be read."""
        versioned = [policy.name for policy in self._config.policies if policy.trained or policy.is_pool]
        return {version for name in ("", *versioned) for version in self._fleets[name].decisions.versions_in_use()}

    def registered(self, kind: str, servers: Mapping[int, tuple[str, int]]) -> None:
        """Set the servers of a kind that name resolution has now: index to (URL, version at registration)."""
        for fleet in self._of_kind(kind):
            fleet.registered(servers)

    def reported(self, kind: str, statuses: Mapping[int, str]) -> None:
        """See `FleetRunner.reported`."""
        for fleet in self._of_kind(kind):
            fleet.reported(statuses)

    def check(self, target: Target) -> None:
        """Check that all further trained policies have the version of `target`, which belongs to the run's own policy.

        Raises:
            ManifestError: a policy's version is incomplete.
        """
        for name in self._config.trained_policies:
            verify(Path(_of_policy(target, name).path), checksums=False)

    async def published(self, target: Target, win_rates: WinRatesOfPools | None = None) -> None:
        """Make `target`, a checked version of the run's own policy, the goal of the servers of all trained policies.

        Each server of a pool is assigned its member, by `win_rates` if the pool is prioritised.
        """
        self.own.publish(target)
        for name in self._config.trained_policies:
            self._fleets[name].publish(_of_policy(target, name))
        version, path = target.version, target.path
        for index, policy in enumerate(self._config.policy_of_server):
            rates = (win_rates or {}).get(policy.name)
            member = policy.versions.choose(version, self._config.seed, index, rates) if policy.is_pool else None
            if member is not None and (chosen := await self._target(policy, member, Path(path).parent)) is not None:
                self._fleets[policy.name].assign(index, chosen)

    async def run(self) -> None:
        """Carry out the fleets' orders until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for fleet in self._fleets.values():
                loops.create_task(fleet.run())

    def status(self) -> list[ServerStatus]:
        """Return the state of each server."""
        return [status for fleet in self._fleets.values() for status in fleet.status()]

    def _of_kind(self, kind: str) -> Iterator[FleetRunner]:
        return (fleet for fleet in self._fleets.values() if fleet.kind == kind)

    async def _target(self, policy: PolicyConfig, version: int, folder: Path) -> Target | None:
        """Return the member `version`; None if its folder is incomplete, so that the server keeps its weights."""
        path = folder / f"v{version}"
        try:
            await asyncio.to_thread(verify, path, checksums=False)
        except ManifestError as error:
            self._log.warning("policy %s: v%d of its pool cannot be used: %s", policy.name, version, error)
            return None
        return Target(version, str(path))


def _of_policy(target: Target, policy: str) -> Target:
    """Return the same version of a further trained policy."""
    folder = Path(target.path)
    return Target(target.version, str(folder.parent.parent / policy / folder.name))
