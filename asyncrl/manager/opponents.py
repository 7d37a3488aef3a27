"""Servers of `policies`: fixed models, and older versions of the trained policy.

Each policy has its own servers, router and `FleetDecisions`, so that its servers are updated, quarantined and routed to
like those of the trained policy, while the staleness gate never depends on them. Whenever a version of the trained
policy is published, each server of a pool is assigned a member (`VersionPoolConfig.choose`). It is drained first, so
every answer comes from one version. Before the first version joins the pool its servers have the initial model.

The members' folders stay on disk: the MasterWorker keeps those that the same rule names, and those that servers read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from asyncrl.comm.http.calls import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.fleet.decisions import FleetDecisions, Target
from asyncrl.manager.fleet.logprob_check import LogprobCheck, logprob_check_tolerance
from asyncrl.manager.fleet.runner import FleetRunner
from asyncrl.manager.messages import ServerStatus
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import PolicyConfig, UpdateMode
from asyncrl.weights.transports.disk import DiskManagerEnd
from asyncrl.weights.versions.manifest import ManifestError, verify


class _PolicyLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the policy's name to each line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"policy {(self.extra or {})['policy']}: {msg}", kwargs


class Opponents:
    """See the module's docstring.

    Args:
        config: names the policies, and has the seed that decides which server gets which version.
        http: connections to the servers.
        clock: seconds in which this process ran.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        service: ManagerService,
        http: JsonHttp,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self._seed, self._log = config.seed, log
        self._of_server = config.policy_of_server
        self._decisions: dict[str, FleetDecisions] = {}
        self._runners: dict[str, FleetRunner] = {}
        tolerance = logprob_check_tolerance(config)
        for policy in config.policies:
            decisions = FleetDecisions(UpdateMode.finish, config.manager.update_timeout_s)
            own_log = _PolicyLog(log, {"policy": policy.name})
            checks = [LogprobCheck(tolerance, config.manager.update_timeout_s, log)] if tolerance else []
            self._decisions[policy.name] = decisions
            self._runners[policy.name] = FleetRunner(
                *(decisions, service, http, DiskManagerEnd()),
                config=config.manager,
                checks=checks,
                policy=policy.name,
                log=own_log,
                clock=clock,
            )

    def versions_in_use(self) -> set[int]:
        """Versions of the trained policy that servers of pools serve or load."""
        pools = {policy.name for policy in self._of_server if policy.path is None}
        return {version for name in pools for version in self._decisions[name].versions_in_use()}

    def registered(self, servers: Mapping[int, tuple[str, int]]) -> None:
        """Set the servers that name resolution has now: index to (URL, version at registration)."""
        for name, runner in self._runners.items():
            runner.registered({index: servers[index] for index in self._servers_of(name) if index in servers})

    async def published(self, version: int, path: str) -> None:
        """Assign each server of a pool its member, now that the trained policy's `version` is at `path`, next to older
        ones.
        """
        for index, policy in enumerate(self._of_server):
            member = None if policy.path is not None else policy.versions.choose(version, self._seed, index)
            if member is not None and (target := await self._target(policy, member, Path(path).parent)) is not None:
                self._runners[policy.name].assign(index, target)

    async def run(self) -> None:
        """Carry out the fleets' orders until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for runner in self._runners.values():
                loops.create_task(runner.run())

    def status(self) -> list[ServerStatus]:
        """Return the state of each server."""
        return [status for runner in self._runners.values() for status in runner.status()]

    def _servers_of(self, name: str) -> Collection[int]:
        return [index for index, policy in enumerate(self._of_server) if policy.name == name]

    async def _target(self, policy: PolicyConfig, version: int, folder: Path) -> Target | None:
        """Return the member `version`; None if its folder is incomplete, so that the server keeps its weights."""
        path = folder / f"v{version}"
        try:
            await asyncio.to_thread(verify, path, checksums=False)
        except ManifestError as error:
            self._log.warning("policy %s: v%d of its pool cannot be played: %s", policy.name, version, error)
            return None
        return Target(version, str(path))
