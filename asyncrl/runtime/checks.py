"""Checks of the settings of processes and their names, and of the open files that the processes need;
`asyncrl.hosts.checks` has those of several hosts.

Every connection is an open file. A certain need is checked against the hard limit of the launcher's host. A need that
depends on how busy a process is, is an upper bound and only causes a warning.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameBackend
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.plan import PROCESS_KINDS
from asyncrl.runtime.process.hardware import LOOPBACK, OTHER_FILES, interface_of, most_open_files
from asyncrl.runtime.settings import ETCD_CHECK, HOSTS_CHECK, LOCAL, etcd_access

_PER_CHILD = 4
"""Open files of the launcher per process: its log, its pipe, its end."""
_PER_EPISODE = 3
"""Open files of a RolloutWorker per episode: to a generation server, and both ends of a connection between an agent's
client and the endpoint.
"""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    system = config.system
    if system.name_resolve == NameBackend.etcd3:
        yield from pkgutil.resolve_name(ETCD_CHECK)(etcd_access(system))
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"
    else:
        if given := [name for name, value in vars(system.etcd).items() if value]:
            yield (
                f"system.etcd.{given[0]}: is for system.name_resolve=etcd3, which is {system.name_resolve}; leave it "
                "out"
            )
        root = Path(system.name_resolve_root).expanduser()
        if system.name_resolve_root and (root.is_file() or not root.is_absolute()):
            yield (
                f"system.name_resolve_root={system.name_resolve_root!r}: names are files below a folder, and this is "
                f"{'a file' if root.is_file() else 'no whole path'}; give a folder, or system.name_resolve=etcd3"
            )
    backend = backend_class(system.launcher)
    yield from backend.faults(config)
    if not system.shared_filesystem and not system.hosts:
        yield (
            "system.shared_filesystem=false: system.hosts is empty, so that everything is on one host; leave "
            "system.shared_filesystem out"
        )
    if system.hosts or system.launcher != LOCAL:
        yield from pkgutil.resolve_name(HOSTS_CHECK)(config, backend)
        return
    if not system.encrypt and system.host not in LOOPBACK and not system.unencrypted_network:
        yield (
            f"system.encrypt=false: anybody on the network of system.host={system.host} could read and change the "
            f"processes' messages; leave it true, or confirm with system.unencrypted_network=true"
        )
    try:
        interface_of(system.host)
    except ValueError as error:
        yield str(error)


class FileNeed(NamedTuple):
    """Open files that a kind of process needs, and why; not `certain` if only at its busiest."""

    process: str
    files: int
    why: str
    certain: bool


def needs(config: ExperimentConfig) -> Iterator[FileNeed]:
    """Yield the needs of the processes of a run that depend on its size."""
    counts = {kind: PROCESS_KINDS[kind].count(config) for kind in PROCESS_KINDS}
    workers, servers, ranks = (
        counts.get(kind, 0) for kind in (names.ROLLOUT_WORKER, names.GENERATION_SERVER, names.MODEL_WORKER)
    )
    rollout, group = config.rollout, config.group_size

    def need(process: str, connections: int, why: str, *, certain: bool) -> FileNeed:
        return FileNeed(process, connections + OTHER_FILES, f"{why}, and {OTHER_FILES} others", certain)

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
    hard = most_open_files()
    short = [need for need in needs(config) if need.files > hard]
    for need in short:
        if need.certain:
            raise ConfigError(f"{_described(need, hard)}: {need.process} could not start")
    return [f"{_described(need, hard)}: at its busiest {need.process} may run out" for need in short]


def _described(need: FileNeed, hard: float) -> str:
    return (
        f"{need.process} needs up to {need.files} open files ({need.why}) and the hard limit is {hard} (ulimit -Hn "
        f"{need.files} raises it, in the shell or the service that starts the run)"
    )
