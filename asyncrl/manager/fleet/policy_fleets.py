"""Servers of `policies`: further trained policies, fixed models, and older versions of the run's own policy.

Each policy has its own servers, router and `FleetDecisions`, so that its servers are updated, quarantined and routed to
like those of the run's own policy. The servers of a trained policy follow its versions in the same way. The staleness
gate counts by the least version among the servers of all trained policies. The other servers do not affect the gate.

Whenever a version is published, each server of a pool is assigned a member (`VersionPoolConfig.choose`). The server is
drained first, so every answer comes from one version. Before the first version joins the pool, its servers have the
initial model.

The members' folders stay on disk. The MasterWorker keeps the versions that the same rule needs, and those that servers
read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.names import POLICY_SERVER, WinRatesOfPools
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.logprob_check import LogprobCheck, logprob_check_tolerance
from asyncrl.manager.fleet.servers import Target
from asyncrl.manager.fleet.servers_in_use import ServersInUse
from asyncrl.manager.fleet.update import ServerUpdater
from asyncrl.manager.messages import ServerStatus
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import PolicyConfig, UpdateMode
from asyncrl.models.weights.transports.disk import DiskManagerEnd
from asyncrl.models.weights.versions.manifest import ManifestError, verify


class _PolicyLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the policy's name to each line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"policy {(self.extra or {})['policy']}: {msg}", kwargs


class PolicyFleets:
    """The servers of all `policies`, with a fleet for each policy.

    Args:
        config: has the policies, and the seed that decides which server gets which version.
        own: the fleet of the run's own policy, whose least version counts too.
        http: connections to the servers.
        clock: seconds in which this process ran.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        own: FleetDecisions,
        service: ManagerService,
        http: JsonHttp,
        log: logging.Logger,
        clock: Callable[[], float],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._seed, self._log = config.seed, log
        self._of_server = config.policy_of_server
        self._trained, self._own = config.trained_policies, own
        self._decisions: dict[str, FleetDecisions] = {}
        self._runners: dict[str, FleetRunner] = {}
        tolerance, updates = logprob_check_tolerance(config), config.manager
        for policy in config.policies:
            mode, share = (updates.update_mode, updates.update_fraction) if policy.trained else (UpdateMode.finish, 1.0)
            decisions = FleetDecisions(mode, updates.update_timeout_s, share)
            own_log = _PolicyLog(log, {"policy": policy.name})
            checks = [LogprobCheck(tolerance, log)] if tolerance else []
            self._decisions[policy.name] = decisions
            self._runners[policy.name] = FleetRunner(
                decisions,
                ServersInUse(decisions, service, policy.name, self.served_version if policy.trained else None),
                ServerUpdater(
                    http,
                    DiskManagerEnd(),
                    timeout_s=updates.update_timeout_s,
                    checks=checks,
                    own_api=config.generation.engine.own_api,
                ),
                http,
                health_interval_s=updates.health_interval_s,
                kind=POLICY_SERVER,
                frozen=policy.url is not None,
                log=own_log,
                clock=clock,
                tell=tell,
            )

    def served_version(self) -> int | None:
        """Return the least version that servers of a trained policy have; None while one of these policies has no
        server.
        """
        fleets = [self._own, *(self._decisions[name] for name in self._trained)]
        served = [version for fleet in fleets if (version := fleet.served_version) is not None]
        return min(served) if len(served) == len(fleets) else None

    def versions_in_use(self) -> set[int]:
        """Versions that servers of pools and of trained policies serve or load."""
        versioned = {policy.name for policy in self._of_server if policy.trained or policy.is_pool}
        return {version for name in versioned for version in self._decisions[name].versions_in_use()}

    def registered(self, servers: Mapping[int, tuple[str, int]]) -> None:
        """Set the servers that name resolution has now: index to (URL, version at registration)."""
        for name, runner in self._runners.items():
            runner.registered({index: servers[index] for index in self._servers_of(name) if index in servers})

    def reported(self, statuses: Mapping[int, str]) -> None:
        """See `FleetRunner.reported`."""
        for runner in self._runners.values():
            runner.reported(statuses)

    def check(self, target: Target) -> None:
        """Check that all further trained policies have the version of `target`, which belongs to the run's own policy.

        Raises:
            ManifestError: a policy's version is incomplete.
        """
        for name in self._trained:
            verify(Path(_of_policy(target, name).path), checksums=False)

    async def published(self, target: Target, win_rates: WinRatesOfPools | None = None) -> None:
        """Make `target`, a checked version of the run's own policy, the goal of the servers of trained policies too.

        Each server of a pool is assigned its member, by `win_rates` if the pool is prioritised.
        """
        for name in self._trained:
            self._runners[name].publish(_of_policy(target, name))
        version, path = target.version, target.path
        for index, policy in enumerate(self._of_server):
            rates = (win_rates or {}).get(policy.name)
            member = policy.versions.choose(version, self._seed, index, rates) if policy.is_pool else None
            if member is not None and (chosen := await self._target(policy, member, Path(path).parent)) is not None:
                self._runners[policy.name].assign(index, chosen)

    async def run(self) -> None:
        """Carry out the fleets' orders until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for runner in self._runners.values():
                loops.create_task(runner.run())

    def status(self) -> list[ServerStatus]:
        """Return the state of each server."""
        return [status for runner in self._runners.values() for status in runner.in_use.status()]

    def _servers_of(self, name: str) -> Collection[int]:
        return [index for index, policy in enumerate(self._of_server) if policy.name == name]

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
