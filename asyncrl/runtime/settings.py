"""Settings of the processes and of how they find each other, and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.comm.name_resolve import EtcdAccess, NameBackend
from asyncrl.comm.names import GENERATION_SERVER, GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER, ROLLOUT_WORKER
from asyncrl.config.setting import modules_in, not_a_choice, setting
from asyncrl.runtime.hardware import LOOPBACK, interface_of

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.

_LAUNCHERS = Path(__file__).parent / "launchers"
_LOCAL = "local"
PLACED = (MASTER_WORKER, MODEL_WORKER, GSERVER_MANAGER, GENERATION_SERVER, ROLLOUT_WORKER)
"""Kinds of processes that a host of several may run."""


class Resume(StrEnum):
    """What becomes of a trial that was used before."""

    auto = "auto"
    """It is continued."""
    never = "never"
    """It is refused."""
    restart = "restart"
    """It is wiped."""


@dataclass
class HostConfig:
    """One host of a run on several."""

    name: str = setting(
        "", "as system.launcher reaches it: what is given to ssh, or the Slurm node; empty: the launcher's own host"
    )
    address: str = setting("", "its IPv4 address, or a name of it, on which the other hosts reach it")
    runs: list[str] = setting(help=f"kinds of processes that run there, of {', '.join(PLACED)}", factory=list)
    gpus: list[str] = setting(help="its GPUs, by CUDA's names for them, e.g. ['0', '1']", factory=list)
    python: str = setting("", "the interpreter there, with asyncrl installed; empty: the same path as the launcher's")


@dataclass
class EtcdConfig:
    """Who the run is to etcd, and how the connection is encrypted. Secrets are files, the same path on every host."""

    user: str = setting("", "as whom to log in; its role needs readwrite of the prefix /asyncrl/; empty: nobody")
    password_file: str = setting("", "file with the user's password, which nobody else may read")
    ca_file: str = setting("", "PEM file of the authority that signed the servers' certificates; empty: no TLS")
    certificate_file: str = setting("", "PEM file of the run's own certificate, where the servers ask for one")
    key_file: str = setting("", "PEM file of that certificate's key, which nobody else may read")


@dataclass
class SystemConfig:
    """Processes and how they find each other."""

    launcher: str = setting("local", "how processes are started", choices=modules_in(_LAUNCHERS))
    hosts: list[HostConfig] = setting(
        help="ssh, slurm: the hosts, each with name, address, runs, gpus and python; all of them see the run folder, "
        "the model and the data under the same paths",
        factory=list,
    )
    launcher_args: list[str] = setting(
        help="further arguments of ssh or srun, e.g. ['-F', 'my_ssh_config'] or ['--account=mine']", factory=list
    )
    name_resolve: NameBackend = setting(NameBackend.file, "name resolution back end")
    name_resolve_root: str = setting(
        "",
        "file: a folder, which trials may share (empty: a private one); etcd3: host:port, of a cluster all members' "
        "separated by spaces",
    )
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    name_resolve_patience_s: float = setting(
        60.0,
        "name resolution may be away for so long (etcd elects a leader, a file handle is stale, the disk is full): "
        "what fails is tried again, then the process ends",
        unit="s",
        minimum=0.0,
    )
    encrypt: bool = setting(True, "CURVE on every ZMQ socket; TLS and a bearer token on every HTTP request")
    unencrypted_network: bool = setting(
        False, "asks a second time for encrypt=false where processes listen on a network: everybody on it is trusted"
    )
    host: str = setting("127.0.0.1", "address the processes bind to and are reached at")
    start_timeout_s: float = setting(120.0, "limit for all processes to become ready", unit="s", minimum=1.0)
    heartbeat_s: float = setting(
        10.0, "lease of a worker's entry; it is renewed three times per lease", unit="s", minimum=0.5
    )
    stall_timeout_s: float = setting(
        120.0, "no train step for so long: say which stage waits for what, and stop", unit="s", minimum=5.0
    )
    restarts_per_process: int = setting(
        3,
        "how often each process that died is started again, within restart_window_s: alone, or with all of the "
        "trainer's side; with one more death the whole run goes back to its newest checkpoint, once, then it ends; 0: "
        "it ends at once",
        minimum=0,
    )
    restart_window_s: float = setting(600.0, "after so long a restart is forgotten", unit="s", minimum=1.0)


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    system = config.system
    if system.name_resolve == NameBackend.etcd3:
        yield from etcd_access(system).faults()
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"
    elif given := [name for name, value in vars(system.etcd).items() if value]:
        yield f"system.etcd.{given[0]}: is for system.name_resolve=etcd3, which is {system.name_resolve}; leave it out"
    if system.hosts or system.launcher != _LOCAL:
        yield from _hosts(config)
        return
    if not system.encrypt and system.host not in LOOPBACK and not system.unencrypted_network:
        yield (
            f"system.encrypt=false: anybody on the network of system.host={system.host} could read and change what the "
            "processes tell each other; leave it true, or ask twice with system.unencrypted_network=true"
        )
    try:
        interface_of(system.host)
    except ValueError as error:
        yield str(error)


def etcd_access(system: SystemConfig) -> EtcdAccess:
    """How etcd is reached."""
    files = {name: str(value) for name, value in vars(system.etcd).items()}
    return EtcdAccess.at(system.name_resolve_root, **files)


def _hosts(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with `system.hosts`."""
    system = config.system
    if not system.hosts:
        yield f"system.hosts=[]: system.launcher={system.launcher} needs to know the hosts and what runs on each"
        return
    if system.launcher == _LOCAL:
        yield "system.launcher='local': starts processes on this host only; with system.hosts use ssh or slurm"
    for number, host in enumerate(system.hosts):
        setting_name = f"system.hosts[{number}]"
        if not host.address:
            yield f"{setting_name}.address='': the other hosts need one to reach {host.name or 'this host'} at"
        for kind in host.runs:
            if kind not in PLACED:
                yield not_a_choice(f"{setting_name}.runs", kind, PLACED)
        if not host.runs:
            yield f"{setting_name}.runs=[]: nothing runs on {host.name or 'this host'}; take it out, or name kinds"
    names = [host.name for host in system.hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"system.hosts: {name or 'the launcher`s own host'} is there {names.count(name)} times; join the entries"
    addresses = {host.address for host in system.hosts}
    if not system.encrypt and addresses - LOOPBACK and not system.unencrypted_network:
        yield (
            "system.encrypt=false: between hosts anybody on their network could read and change what the processes "
            "tell each other; leave it true, or ask twice with system.unencrypted_network=true"
        )
    placed = [kind for host in system.hosts for kind in host.runs]
    for kind in PLACED:
        if kind not in placed:
            yield f"system.hosts: none runs {kind}; add it to the runs of one"
        elif kind in (MASTER_WORKER, GSERVER_MANAGER) and placed.count(kind) > 1:
            yield f"system.hosts: {placed.count(kind)} hosts run {kind}, of which there is one; leave it to one host"
