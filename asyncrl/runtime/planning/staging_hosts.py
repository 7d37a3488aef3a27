"""Hosts with a staging server."""

from __future__ import annotations

from asyncrl.comm.names import GENERATION_SERVER, ROLLOUT_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.settings import HostConfig

_STAGED = frozenset({GENERATION_SERVER, ROLLOUT_WORKER})
"""Kinds of processes that may run on hosts that share no folder."""


def staging_hosts(config: ExperimentConfig) -> list[HostConfig]:
    """Return the hosts with a staging server, the launcher's own first; empty if all hosts see one folder."""
    hosts = [] if config.system.shared_filesystem else config.system.hosts
    return sorted((host for host in hosts if not host.name or not _STAGED.isdisjoint(host.runs)), key=lambda h: h.name)


def brings_inputs(config: ExperimentConfig) -> bool:
    """True if staging servers fetch RolloutWorkers' inputs, because some of their hosts share no folder."""
    return any(host.name and ROLLOUT_WORKER in host.runs for host in staging_hosts(config))
