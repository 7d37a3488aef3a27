"""Number of open files that the processes of a run need, checked before they start and allowed in each.

Every connection is an open file. A certain need is checked against the hard limit of the launcher's host. A need that
depends on how busy a process is, is an upper bound and only causes a warning.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.comm import names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.plan import PROCESS_KINDS

OTHERS = 128
"""Descriptors of a process beside its connections: logs, journals, name resolution, HTTP servers."""
_PER_CHILD = 4
"""Descriptors of the launcher per process: its log, its pipe, its end."""
_PER_EPISODE = 3
"""Descriptors of a RolloutWorker per episode: to a generation server, and both ends of a connection between an agent's
client and the endpoint.
"""


def allow_all_files() -> None:
    """Let this process open as many files as its hard limit allows.

    The soft limit, mostly 1,024, is for programs that wait with `select`; none of a run's processes does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_connections(connections: int, to_whom: str) -> None:
    """Let this process open as many files as its hard limit allows, and check that it allows this many connections.

    Raises:
        OSError: the hard limit is too low; the message names the other ends of the connections, `to_whom`.
    """
    allow_all_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < (wanted := connections + OTHERS):
        raise OSError(
            errno.EMFILE,
            f"the connections to {to_whom} take {wanted} open files and the hard limit is {hard}: raise it, here and "
            f"for whatever starts the run (ulimit -Hn {wanted})",
        )


class DescriptorNeed(NamedTuple):
    """Open files that a kind of process needs, and why; not `certain` if only at its busiest."""

    process: str
    files: int
    why: str
    certain: bool


def needs(config: ExperimentConfig) -> Iterator[DescriptorNeed]:
    """Yield the needs of the processes of a run that depend on its size."""
    counts = {kind: PROCESS_KINDS[kind].count(config) for kind in PROCESS_KINDS}
    workers, servers, ranks = (
        counts.get(kind, 0) for kind in (names.ROLLOUT_WORKER, names.GENERATION_SERVER, names.MODEL_WORKER)
    )
    rollout, group = config.rollout, config.group_size

    def need(process: str, connections: int, why: str, *, certain: bool) -> DescriptorNeed:
        return DescriptorNeed(process, connections + OTHERS, f"{why}, and {OTHERS} others", certain)

    yield need(names.MASTER_WORKER, ranks + workers, f"{ranks} training ranks, {workers} RolloutWorkers", certain=True)
    reason = f"{workers} RolloutWorkers, {servers} generation servers"
    yield need(names.GSERVER_MANAGER, workers + servers, reason, certain=True)
    processes = sum(counts.values())
    yield need("launcher", _PER_CHILD * processes, f"{_PER_CHILD} for each of {processes} processes", certain=False)
    at_a_time = rollout.max_concurrent * group
    reason = f"{_PER_EPISODE} for each of rollout.max_concurrent={rollout.max_concurrent} x group_size={group} episodes"
    yield need(names.ROLLOUT_WORKER, _PER_EPISODE * at_a_time, reason, certain=False)
    admitted = (config.max_head_offpolicyness + 1) * config.train_batch_size
    rollouts = min(workers * rollout.max_concurrent, admitted)
    reason = f"a request for each of {rollouts} rollouts x group_size={group}, as all but one server may be away"
    yield need(names.GENERATION_SERVER, rollouts * group, reason, certain=False)


def check_files(config: ExperimentConfig) -> list[str]:
    """Return warnings of processes that may need more open files than this host's hard limit.

    Raises:
        ConfigError: one needs more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    short = [need for need in needs(config) if hard != resource.RLIM_INFINITY and need.files > hard]
    for need in short:
        if need.certain:
            raise ConfigError(f"{_described(need, hard)}: {need.process} could not start")
    return [f"{_described(need, hard)}: at its busiest {need.process} may run out" for need in short]


def _described(need: DescriptorNeed, hard: int) -> str:
    return (
        f"{need.process} needs up to {need.files} open files ({need.why}) and the hard limit is {hard} (ulimit -Hn "
        f"{need.files} raises it, in the shell or the service that starts the run)"
    )
